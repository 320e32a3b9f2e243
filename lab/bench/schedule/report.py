"""``kvgate bench schedule``: what plans and the order of those that wait cost, and what strategies do to them."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from gateway.fingerprint import Fingerprint
from gateway.placement.planner import Plan, Planner
from gateway.placement.separation import RequestSize, Separation
from gateway.registry import Instance, InstanceState, LoadTracker, Model
from gateway.routing import POLICIES, Calibration, CostModel, LearnedAffinity, RecentRoutes
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.control import EventsInfo, InstanceStats, LoadStats, PrefixCacheStats, TierStats
from kvcontrol.core.garbage import freeze_garbage
from kvcontrol.core.hashing import token_bytes
from kvcontrol.core.ids import BlockHash, Epoch, InstanceId
from kvcontrol.core.roles import EngineRole, KVTransport
from kvcontrol.prefix_reuse import FleetIndex
from kvcontrol.scheduler_ir import ThresholdSeparator
from kvcontrol.scheduler_ir.strategies import STRATEGIES, WaitingQueue, make_strategy
from lab.bench.pool import report as pool
from lab.bench.pool.lengths import Workload
from lab.bench.schedule import building, ordering, serving
from lab.report import Grid, Host, Report

NAME = "schedule"
INSTANCES = 64
PREFILLING = 8
PROMPT_TOKENS = 4096
_RUNNING = 128
"""Requests that run at once: as one comes one ends, and the one that came eight before gets its first token."""
_COMPUTING = 8
_CHECKED = 16
"""After so many plans a health check has brought another snapshot of an instance."""
_BLOCK_TOKENS = 64
_COSTS = CostModel(prefill_tokens_per_s=20_000.0, decode_load_s=0.001)
_IDENTITY = CacheIdentity(model="m", revision="r", kv_dtype="bfloat16", block_size_tokens=_BLOCK_TOKENS)
_STATS = InstanceStats(
    epoch=Epoch("e"),
    engine="none",
    engine_version="0",
    device="cuda",
    started_at_s=0.0,
    context_length_tokens=131_072,
    identity=_IDENTITY,
    events=EventsInfo(endpoint="tcp://*:1", replay_endpoint="tcp://*:2", seq=-1),
    tiers={},
    load=LoadStats(running=0, waiting=0, max_batch_size=256),
    prefix_cache=PrefixCacheStats(query_tokens=0, hit_tokens=0),
    transports={KVTransport.MIGRATION: "tcp"},
)
_DDR = TierStats(capacity_blocks=1 << 16, used_blocks=1, cached_blocks=1, block_bytes=1 << 20)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """What to measure. ``traces`` is a folder with public traces, None for drawn lengths where none is found."""

    traces: Path | None
    strategies: Sequence[str]
    quick: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimes:
    """One request planned over a fleet: routing, separation, its plan, and its turn in a queue of a thousand; processor
    time of the thread that does it, so that a busy machine doesn't count. In the cases ``hybrid`` and ``separated``
    four instances hold the first half of a prompt, in ``shared`` all do, and more in a tier below HBM.
    """

    case: str
    instances: int
    plans: int
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float


def run(plan: SchedulePlan, say: Progress) -> Report:
    """Measure, and tell ``say`` before each part. What is timed is timed in rounds, of which the calmest (with the
    lowest p99) counts: what else the machine does only adds.
    """
    rounds = 1 if plan.quick else 3
    freeze_garbage()  # as the gateway and the engines do when they have started; what comes later is collected
    workloads = pool.workloads(plan.traces, say)  # before anything is measured: it may lack something
    plans = _plans(say, count=100 if plan.quick else 3_000, rounds=rounds)
    orders: list[ordering.OrderTimes] = []
    sizes = {"1k": 100, "10k": 300} if plan.quick else {"1k": 1_000, "10k": 10_000}
    metrics = {"plan_p50_us": plans[0].p50_us, "plan_p99_us": plans[0].p99_us, "plan_pd_p99_us": plans[1].p99_us}
    metrics["plan_shared_p99_us"] = plans[2].p99_us
    for size, waiting in sizes.items():
        steps = 50 if plan.quick else 3_000
        times = []
        for name in plan.strategies:
            say(f"{name}: {waiting:,} waiting")
            make = partial(make_strategy, name)
            times.append(_calmest([ordering.measure(make, waiting=waiting, steps=steps) for _ in range(rounds)]))
        orders += times
        metrics[f"order_{size}_p50_us"] = max(each.p50_us for each in times)
        metrics[f"order_{size}_p99_us"] = max(each.p99_us for each in times)
    builds = []
    for requests in (1, 16, 64):
        say(f"graphs of {requests} requests")
        builds.append(building.measure(requests=requests, repeats=5 if plan.quick else 40))
    metrics["build_optimize_1_us"] = builds[0].build_p50_us + builds[0].optimize_p50_us
    served = _served(plan, workloads, say)
    for one in served:
        metrics.setdefault(f"fifo_in_time_percent_{one.workload}", one.in_time_percent)
    grids = (
        _grid("plans", PlanTimes, plans),
        _grid("orders", ordering.OrderTimes, orders),
        _grid("graphs", building.BuildTimes, builds),
        _grid("served", serving.Served, served),
    )
    not_run = {"fleets, queues and workloads of full size": "--quick"} if plan.quick else {}
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=grids, not_run=not_run)


def _served(plan: SchedulePlan, workloads: Sequence[Workload], say: Progress) -> list[serving.Served]:
    model = serving.EngineModel()
    served = []
    for workload in workloads:
        lengths = islice(workload.endless(), 200 if plan.quick else 3_000)
        asked = serving.requests_of(lengths, load=0.7, model=model)
        for name in plan.strategies:
            say(f"{name}: {workload.name}")
            served.append(serving.serve(partial(make_strategy, name), asked, workload=workload.name, model=model))
    return served


def _plans(say: Progress, *, count: int, rounds: int) -> list[PlanTimes]:
    say(f"plans over {INSTANCES} instances")
    return [
        _calmest(
            [_Fleet(INSTANCES - prefilling, prefilling, holders=holders).measure(case, count) for _ in range(rounds)]
        )
        for case, prefilling, holders in (("hybrid", 0, 4), ("separated", PREFILLING, 4), ("shared", 0, INSTANCES))
    ]


class _Timed(Protocol):
    @property
    def p99_us(self) -> float: ...


_Times = TypeVar("_Times", bound=_Timed)


def _calmest(rounds: Sequence[_Times]) -> _Times:
    return min(rounds, key=lambda each: each.p99_us)


class _Running:
    """A request that was planned: it counts at its instances until it ends, and its first token says how fast they are,
    which is what is assumed, give or take a tenth.
    """

    def __init__(self, load: LoadTracker, plan: Plan) -> None:
        self._plan = plan
        self._permits = [
            load.placed(InstanceId(leg.device), uncached_tokens=plan.uncached_tokens, cold=plan.cold)
            for leg in plan.execution.legs
        ]

    def began(self, planner: Planner) -> None:
        for permit in self._permits:
            permit.first_byte()
        candidate = self._plan.decision.candidate
        tokens = self._plan.uncached_tokens + candidate.prefill_tokens
        took_s = 0.01 + tokens / _COSTS.prefill_tokens_per_s + candidate.running * _COSTS.decode_load_s
        planner.began(self._plan, took_s=took_s * (0.9 + tokens % 7 / 30))

    def ended(self) -> None:
        for permit in self._permits:
            permit.release()


class _Fleet:
    """A planner over instances that hold prompts, with a queue behind it."""

    def __init__(self, answering: int, prefilling: int, *, holders: int) -> None:
        """Each prompt's beginning is held by so many ``holders``; where that is all, each has a tier below HBM, too."""
        self._holders = min(holders, answering)
        self._tiers = tiers = {CacheTier.DDR: _DDR} if holders >= answering else {}
        # As the registry gives them: one tuple while nothing changes, and a list made for each request.
        self._instances = tuple([_instance(f"d{number:02}", EngineRole.HYBRID, tiers) for number in range(answering)])
        self._prefills = [_instance(f"p{number:02}", EngineRole.PREFILL, {}) for number in range(prefilling)]
        self._index = FleetIndex()
        for each in self._instances if tiers else ():
            self._index.extend(each.id, CacheTier.DDR, [(BlockHash(each.id.encode()), None)])
        self._load = LoadTracker()
        self._queue: WaitingQueue = make_strategy("hybrid")
        self._planner = Planner(
            policy=POLICIES["cost_aware"](_COSTS),
            index=self._index,
            load=self._load,
            recent=RecentRoutes(lifetime_s=10.0),
            learned=LearnedAffinity(self._index, capacity_tokens=1 << 20),
            calibration=Calibration(_COSTS),
            clock=time.monotonic,
            separation=Separation(ThresholdSeparator(min_uncached_tokens=1024)),
            prefilling=lambda _: list(self._prefills),
        )

    def measure(self, case: str, count: int) -> PlanTimes:
        """Plan ``count`` requests one after the other, with a thousand waiting: each begins with a prefix that some
        instances hold half of. What isn't planning (hashing the prompt) is done before.
        """
        coming = ordering.arrivals()
        for request in islice(coming, 1000):
            self._queue.add(request)
        took_s = []
        running: deque[_Running] = deque()
        for number in range(count):
            if number % _CHECKED == 0:
                self._check(number // _CHECKED)
            prompt = self._prompt(number)
            request = next(coming)
            size = RequestSize(
                request_id=request.request_id, prompt_tokens=prompt.tokens, max_tokens=256, separable=True
            )
            begin_s = time.thread_time()
            self._queue.add(request)
            for turn in self._queue.peek(1, request.arrived_s):
                self._queue.start(turn.request_id, request.arrived_s)
            plan = self._planner.plan(prompt, self._instances, size=size)
            took_s.append(time.thread_time() - begin_s)
            running.append(_Running(self._load, plan))
            if len(running) > _COMPUTING:
                running[-_COMPUTING].began(self._planner)
            if len(running) > _RUNNING:
                running.popleft().ended()
        for each in running:
            each.ended()
        took_s.sort()
        return PlanTimes(
            case=case,
            instances=len(self._instances) + len(self._prefills),
            plans=count,
            p50_us=took_s[count // 2] * 1e6,
            p90_us=took_s[count * 9 // 10] * 1e6,
            p99_us=took_s[count * 99 // 100] * 1e6,
            max_us=took_s[-1] * 1e6,
        )

    def _check(self, number: int) -> None:
        place = number % len(self._instances)
        instances = list(self._instances)
        each = instances[place]
        instances[place] = _instance(each.id, each.role, self._tiers, running=number % 256)
        self._instances = tuple(instances)

    def _prompt(self, number: int) -> Fingerprint:
        """A prompt of its own after one of 64 beginnings; its blocks are hashed, a few instances hold the beginning."""
        beginning = number % 64
        half = PROMPT_TOKENS // 2
        tokens = [beginning * 100_000 + place for place in range(half)]
        tokens += [(number + 100) * 100_000 % (1 << 31) + place for place in range(half)]
        prompt = Fingerprint(token_bytes(tokens), model="m", salt="s")
        hashes = prompt.hashes(_IDENTITY)
        if number < 64:  # noqa: PLR2004 - once for each beginning
            held = hashes[: half // _BLOCK_TOKENS]
            pairs = list(zip(held, [None, *held[:-1]], strict=True))
            for place in range(self._holders):
                self._index.extend(self._instances[(beginning + place) % len(self._instances)].id, CacheTier.HBM, pairs)
        return prompt


def _instance(name: str, role: EngineRole, tiers: dict[CacheTier, TierStats], *, running: int = 0) -> Instance:
    instance = Instance(
        id=InstanceId(name),
        url=f"http://{name}",
        state=InstanceState.HEALTHY,
        reason="",
        models=(Model(id="m", card={}),),
        stats=msgspec.structs.replace(
            _STATS, role=role, tiers=tiers, load=LoadStats(running=running, waiting=0, max_batch_size=256)
        ),
        settled=True,
    )
    return replace(instance, role=role)


def _grid(name: str, kind: type, rows: Sequence[object]) -> Grid:
    return Grid(
        name=name,
        columns=tuple(field.name for field in fields(kind)),
        rows=tuple(astuple(each) for each in rows),  # type: ignore[call-overload]
    )


def all_strategies() -> tuple[str, ...]:
    """The names of those that ship."""
    return tuple(STRATEGIES)
