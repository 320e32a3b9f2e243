"""``kvgate bench fleet --study``: what tiers below HBM bring a fleet, what its gateway's decisions cost as it grows.

Both compare fleets of one run: what is to be read is a figure beside the first row's, not the figure itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from engines.sim.profile import Profile
from kvcontrol.core.blocks import CacheTier
from kvgate.failure import CommandError
from lab.report import Cell, Grid
from lab.simulate.board import FleetBoard
from lab.simulate.outcome import FleetOutcome
from lab.simulate.study import Study
from lab.simulate.workload import Workload
from lab.traces import AGENTIC, MOONCAKE

_TIERS: Final = (("HBM", 0.0, 0.0), ("HBM + DDR", 2.0, 0.0), ("HBM + DDR + NVMe", 2.0, 20.0))
"""Multiples of HBM."""
_SIZES: Final = ((8, 1600), (64, 400), (512, 100))
"""Instances, and requests of each copy of the trace."""
_PER_COPY: Final = 8
"""Instances for each copy, so that all fleets are equally busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """``quick``: few requests, to see that it runs."""

    traces: Path
    router: str
    profile: Profile
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A trace, by how many instances it is served, how much faster than recorded, and how many of its requests."""

    trace: str
    instances: int
    speed: float
    limit: int


_LOADS: Final = (
    _Load(trace=MOONCAKE, instances=4, speed=0.5, limit=4000),
    _Load(trace=AGENTIC, instances=2, speed=2.0, limit=800),
)


def tiers(plan: StudyPlan) -> Grid:
    """Serve each trace by HBM alone, with DDR below it, and with NVMe below that."""
    rows: list[tuple[Cell, ...]] = []
    for load in _LOADS:
        alone: FleetOutcome | None = None
        for name, ddr, nvme in _TIERS:
            study = Study(
                trace=_there(plan.traces / load.trace),
                profile=plan.profile,
                instances=load.instances,
                routers=(plan.router,),
                speed=load.speed,
                limit=60 if plan.quick else load.limit,
                ddr=ddr,
                nvme=nvme,
            )
            outcome = _served(study, f"{Path(load.trace).stem}, {name}", study.workload())
            alone = alone or outcome
            rows.append((Path(load.trace).parent.name, load.instances, name, *_tier_cells(outcome, alone)))
    return Grid(
        name="tiers",
        columns=(
            "trace",
            "instances",
            "tiers",
            "ttft_p50_s",
            "ttft_p99_s",
            "hit_ratio",
            "from_hbm_ratio",
            "from_ddr_ratio",
            "from_nvme_ratio",
            "of_ceiling_ratio",
            "shed_ratio",
            "refused_ratio",
            "requests_by_instance",
            "ttft_p50_of_hbm_alone",
            "ttft_p99_of_hbm_alone",
            "computed_of_hbm_alone",
        ),
        rows=tuple(rows),
    )


def _tier_cells(outcome: FleetOutcome, alone: FleetOutcome) -> tuple[Cell, ...]:
    prompt = max(1, outcome.prompt_tokens)
    found = outcome.found_by_tier
    return (
        outcome.ttft(0.5),
        outcome.ttft(0.99),
        outcome.hit_rate,
        *(found.get(tier, 0) / prompt for tier in (CacheTier.HBM, CacheTier.DDR, CacheTier.NVME)),
        outcome.of_ceiling,
        outcome.shed_rate,
        outcome.refused_rate,
        outcome.placed,
        *(_ratio(outcome.ttft(share), alone.ttft(share)) for share in (0.5, 0.99)),
        _ratio(outcome.computed_tokens, alone.computed_tokens),
    )


def decisions(plan: StudyPlan) -> Grid:
    """Time the gateway's decisions in fleets of three sizes; round robin's beside, which looks prompts up in the index
    too, and compares nothing. ``core_ratio`` is the share of a core that they take at the fleet's rate of requests.
    """
    rows: list[tuple[Cell, ...]] = []
    for router in dict.fromkeys((plan.router, "round_robin")):
        least: FleetOutcome | None = None
        for instances, limit in _SIZES[:2] if plan.quick else _SIZES:
            study = Study(
                trace=_there(plan.traces / MOONCAKE),
                profile=plan.profile,
                instances=instances,
                routers=(router,),
                copies=instances // _PER_COPY,
                limit=8 if plan.quick else limit,
            )
            workload = study.workload()
            outcome = _served(study, f"{router}, {instances} instances", workload)
            least = least or outcome
            rows.append(
                (
                    router,
                    instances,
                    outcome.requests,
                    outcome.placed,
                    outcome.decision_us,
                    _ratio(outcome.decision_us, least.decision_us),
                    _ratio(instances, least.instances),
                    outcome.decision_us * 1e-6 * outcome.requests / max(1e-9, workload.spans_s),
                )
            )
    return Grid(
        name="decisions",
        columns=(
            "router",
            "instances",
            "requests",
            "requests_by_instance",
            "decision_us",
            "of_the_smallest",
            "instances_of_the_smallest",
            "core_ratio",
        ),
        rows=tuple(rows),
    )


STUDIES: Final[Mapping[str, Callable[[StudyPlan], Grid]]] = MappingProxyType({"tiers": tiers, "decisions": decisions})
"""By the name that ``--study`` takes."""


def _served(study: Study, what: str, workload: Workload) -> FleetOutcome:
    with FleetBoard().shown(what, workload.spans_s) as told:
        return study.run(study.routers[0], workload, told)


def _there(trace: Path) -> Path:
    if not trace.is_file():
        raise CommandError(f"there is no trace {trace}", "name the folder that holds it with --traces")
    return trace


def _ratio(value: float | None, of: float | None) -> Cell:
    return value / of if value is not None and of else None
