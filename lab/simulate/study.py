"""Routing policies on one workload, side by side, and how their outcomes are told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from engines.sim.behaviour import Behaviour
from engines.sim.profile import MOST_BLOCKS, EngineShape, Profile
from gateway.routing import POLICIES, CostModel, RoutingPolicy
from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy import make_policy
from kvcontrol.kv_runtime import ArenaError
from kvgate.failure import CommandError
from lab.report import Cell, Grid
from lab.simulate.admission import AdmissionRules
from lab.simulate.fleet import Fleet, FleetPlan
from lab.simulate.limits import MOST_FLEET_BLOCKS, MOST_TIMES_HBM
from lab.simulate.outcome import FleetOutcome, Tally
from lab.simulate.peers import PEERS
from lab.simulate.workload import Workload
from lab.traces import read_requests

ROUTERS: Final = (*POLICIES, *PEERS)
"""The names of all that a fleet can be routed by: the gateway's own policies, and others' formulas."""
COLUMNS = (
    "router",
    "requests_per_s",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tpot_mean_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "itl_max_ms",
    "hit_ratio",
    "of_ceiling_ratio",
    "hotspot_ratio",
    "requests_by_instance",
    "busy_ratio",
    "shed_ratio",
    "refused_ratio",
    "preemptions",
    "decision_us",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """``ddr`` and ``nvme`` are multiples of HBM; ``limit`` is how many of the trace's requests are used, 0 all, and
    ``seconds`` how many of its first ones, 0 all, before ``speed`` counts. ``policy`` chooses who leaves HBM and the
    tiers, that of the profile where it is empty. Engines' steps take ``slow`` times as long as the profile says.
    ``users`` send in a closed loop for ``duration`` seconds, and leave out what no engine can take; 0: an open loop.
    ``max_batch`` and ``kv_blocks`` are the engines' where they aren't 0, ``pace`` where it isn't empty.
    """

    trace: Path
    profile: Profile
    instances: int
    routers: Sequence[str]
    copies: int = 1
    speed: float = 1.0
    limit: int = 0
    ddr: float = 0.0
    nvme: float = 0.0
    seconds: float = 0.0
    policy: str = ""
    seed: int = 0
    jitter: float = 0.0
    slow: float = 1.0
    users: int = 0
    duration: float = 0.0
    max_batch: int = 0
    kv_blocks: int = 0
    pace: str = ""
    rules: AdmissionRules = field(default_factory=AdmissionRules)

    def __post_init__(self) -> None:
        for name in self.routers:
            if name not in ROUTERS:
                raise ValueError(f"unknown router {name!r}; known: {', '.join(ROUTERS)}")
        if not self.routers:
            raise ValueError(f"no router is named; there are {', '.join(ROUTERS)}")
        if self.policy:
            make_policy(self.policy, capacity_blocks=1)
        self._need_sane_sizes()

    def _need_sane_sizes(self) -> None:
        """Raise ``ValueError`` for more than a simulation may be told."""
        for name, times in (("DDR", self.ddr), ("NVMe", self.nvme)):
            most = min(MOST_TIMES_HBM, MOST_BLOCKS / self.shape.hbm_blocks)
            if not 0 <= times <= most:
                raise ValueError(f"{name} of {times:g} times HBM; allowed is 0 to {most:,.6g} with this profile")
        if self.nvme and not self.ddr:
            raise ValueError("NVMe needs DDR above it: give both")
        shape = self.engine().engine
        blocks = (shape.hbm_blocks + shape.ddr_blocks + shape.nvme_blocks) * self.instances
        if blocks > MOST_FLEET_BLOCKS:
            raise ValueError(
                f"{self.instances:,} instances with DDR of {self.ddr:g} and NVMe of {self.nvme:g} times HBM have "
                f"{blocks:,} blocks in all; at most {MOST_FLEET_BLOCKS:,} are simulated"
            )

    def workload(self) -> Workload:
        """Read the trace; raises ``TraceError``, ``OSError``, ``ValueError``."""
        requests = read_requests(self.trace)
        if not any(each.block_ids for each in requests):  # a trace of lengths alone has no blocks to give a size
            size = self.profile.engine.block_tokens
            requests = [replace(each, block_tokens=size) for each in requests]
        if self.seconds and requests:
            end_s = requests[0].at_s + self.seconds
            requests = [each for each in requests if each.at_s < end_s]
        requests = requests[: self.limit or None]
        if not requests:
            raise ValueError(
                f"{self.trace} has no request" + (f" in its first {self.seconds:g} s" if self.seconds else "")
            )
        fitting = requests
        if self.users:
            shape = self.shape
            most = min(shape.context_tokens, shape.hbm_blocks * shape.block_tokens)
            fitting = [each for each in requests if each.prompt_tokens + (each.output_tokens or 1) <= most]
            if not fitting:
                raise ValueError(f"an engine takes at most {most:,} tokens, and each request of {self.trace} has more")
        left_out = len(requests) - len(fitting)
        return Workload(requests=fitting, copies=self.copies, speed=self.speed, left_out=left_out)

    @property
    def shape(self) -> EngineShape:
        """The profile's engine with this study's batch, blocks of HBM and pace."""
        shape = self.profile.engine
        return replace(
            shape,
            max_batch=self.max_batch or shape.max_batch,
            hbm_blocks=self.kv_blocks or shape.hbm_blocks,
            pace=self.pace or shape.pace,
        )

    def engine(self) -> Profile:
        """Return the profile with this study's tiers and policy."""
        shape = self.shape
        if self.policy:
            shape = replace(shape, policy=self.policy, tier_policy=self.policy)
        ddr, nvme = round(shape.hbm_blocks * self.ddr), round(shape.hbm_blocks * self.nvme)
        return replace(self.profile, engine=replace(shape, ddr_blocks=ddr, nvme_blocks=nvme))

    def run(
        self,
        router: str,
        workload: Workload,
        progress: Callable[[float], None] = lambda _: None,
        hopeless: Callable[[Tally], bool] = lambda _: False,
    ) -> FleetOutcome:
        """Serve the workload with one router; see ``Fleet.run``. ``CommandError`` where there is no memory for it."""
        profile = self.engine()
        shape = profile.engine
        plan = FleetPlan(
            profile=profile,
            instances=self.instances,
            make_policy=_maker(router, shape.hbm_blocks * shape.block_tokens),
            rules=self.rules,
            behaviour=Behaviour(seed=self.seed, jitter=self.jitter, slow=self.slow),
            users=self.users,
            duration_s=self.duration,
        )
        try:
            fleet = Fleet(plan, workload)
        except ArenaError as error:
            raise CommandError(
                f"{self.instances} instances with {shape.ddr_blocks:,} blocks of DDR each can't be simulated: {error}",
                "use fewer instances or less DDR",
            ) from error
        try:
            return fleet.run(progress, hopeless)
        finally:
            fleet.close()


def _maker(router: str, hbm_tokens: int) -> Callable[[CostModel], RoutingPolicy]:
    """Return what makes a router for instances with so much room."""
    if router in POLICIES:
        return POLICIES[router]
    return lambda _: PEERS[router](hbm_tokens)


def not_known(workload: Workload, study: Study) -> dict[str, str]:
    """Return the figures that the report lacks, the requests that were left out, and the limits of the profile."""
    profile, found = study.profile, {}
    if profile.limits:
        own = study.shape.pace == profile.engine.pace
        other = "" if own else f"of its own pace {profile.engine.pace}; none of it is known of {study.shape.pace}: "
        found[f"limits of {profile.name}"] = other + profile.limits
    if workload.left_out:
        found[f"{workload.left_out} requests"] = "they are longer than an engine takes, and are left out"
    if not any(each.block_ids for each in workload.requests):
        found["hit_ratio"] = (
            "the trace has lengths alone: no two prompts are known to share a block, so nothing is found"
        )
    return found


def row(outcome: FleetOutcome, *, router: str) -> tuple[Cell, ...]:
    """Return an outcome as a row under ``COLUMNS``."""
    return (
        router,
        outcome.requests_per_s,
        outcome.ttft_mean_s,
        outcome.ttft(0.5),
        outcome.ttft(0.9),
        outcome.ttft(0.99),
        outcome.tpot_mean_ms,
        outcome.itl_ms(0.5),
        outcome.itl_ms(0.99),
        outcome.itl_ms(1.0),
        outcome.hit_rate,
        outcome.of_ceiling,
        outcome.hotspot,
        outcome.placed,
        outcome.busy,
        outcome.shed_rate,
        outcome.refused_rate,
        outcome.preemptions,
        outcome.decision_us,
    )


def grids(outcomes: Mapping[str, FleetOutcome]) -> tuple[Grid, ...]:
    """Return a table of routers, and one of where their tokens came from."""
    tiers = (CacheTier.HBM, CacheTier.DDR, CacheTier.NVME)
    return (
        Grid(
            name="routers", columns=COLUMNS, rows=tuple(row(outcome, router=name) for name, outcome in outcomes.items())
        ),
        Grid(
            name="prompt tokens",
            columns=("router", "prompt", *(f"from_{tier.lower()}" for tier in tiers), "computed", "ceiling"),
            rows=tuple(
                (
                    name,
                    outcome.prompt_tokens,
                    *(outcome.found_by_tier.get(tier, 0) for tier in tiers),
                    outcome.computed_tokens,
                    outcome.ceiling_tokens,
                )
                for name, outcome in outcomes.items()
            ),
        ),
    )
