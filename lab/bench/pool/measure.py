"""Everything ``kvgate bench pool`` measures: allocation, fragmentation, utilisation, compaction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.bench.pool import allocation, compaction, packing
from lab.bench.pool.lengths import Workload

NAME = "pool"
BLOCK_TOKENS = (16, 64, 128, 256)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What to measure; ``quick`` times few calls and follows few steps."""

    workloads: Sequence[Workload]
    blocks: int = 16_384
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTimes:
    """Of one kind of call on one workload: how many, how large in the median, and microseconds."""

    workload: str
    calls: str
    timed: int
    blocks_p50: int
    wall_p50_us: float
    wall_p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    per_block_ns: float
    """Wall time of all calls by the number of all blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMeasured:
    """Metrics by name, and what stands behind them, call by kind."""

    metrics: dict[str, float]
    allocations: tuple[AllocationTimes, ...]


def run(plan: PoolPlan, say: Progress) -> PoolMeasured:
    """Measure all of the plan, and tell ``say`` before each step.

    ``alloc_p50_us`` and ``alloc_p99_us`` are those of the first workload's stream of calls (see ``allocation``), the
    utilisation is the least and the fragmentation the greatest of all workloads.
    """
    metrics: dict[str, float] = {}
    times: list[AllocationTimes] = []
    for place, workload in enumerate(plan.workloads):
        say(f"allocations: {workload.name}")
        found = _allocations(workload, plan)
        times += found.allocations
        if place == 0:
            metrics |= found.metrics
    packed: list[dict[str, float]] = []
    for workload in plan.workloads:
        say(f"utilisation and fragmentation: {workload.name}")
        packed.append(_packed(workload, plan))
        metrics |= {f"{name}_{workload.name}_{unit}": value for name, unit, value in _parts(packed[-1])}
    metrics["fragmentation_max_pct"] = max(each["fragmentation_max_pct"] for each in packed)
    metrics["utilisation_pct"] = min(each["utilisation_pct"] for each in packed)
    metrics["watermark_pct"] = packing.WATERMARK * 100
    for workload in plan.workloads:
        say(f"compaction: {workload.name}")
        metrics |= _compacted(workload, plan)
    metrics["timer_ns"] = allocation.timer_ns()
    return PoolMeasured(metrics=metrics, allocations=tuple(times))


def _allocations(workload: Workload, plan: PoolPlan) -> PoolMeasured:
    calls = 2_000 if plan.quick else 30_000
    measured = allocation.AllocationPlan(blocks=plan.blocks, calls=calls)
    stream = allocation.time_pool(workload, measured)
    whole = allocation.time_pool(workload, measured, chunk_blocks=plan.blocks)
    manager = allocation.time_manager(workload, measured)
    kinds = {
        "all of the stream": stream,
        "one block": stream.of(lambda blocks: blocks == 1),
        "a prompt's chunk": stream.of(lambda blocks: blocks > 1),
        "a whole prompt": whole.of(lambda blocks: blocks > 1),
        "the stream, by BlockManager": manager,
    }
    times = [_times(workload.name, kind, found) for kind, found in kinds.items() if found.wall_s]
    first = times[0]
    return PoolMeasured(
        metrics={
            "alloc_p50_us": first.wall_p50_us,
            "alloc_p99_us": first.wall_p99_us,
            "alloc_cpu_p50_us": first.cpu_p50_us,
            "alloc_cpu_p99_us": first.cpu_p99_us,
            "alloc_per_block_ns": first.per_block_ns,
            "alloc_occupancy_min_pct": stream.occupancy_min * 100,
            "alloc_evicting_pct": stream.evicting / len(stream.wall_s) * 100,
        },
        allocations=tuple(times),
    )


def _times(workload: str, kind: str, found: allocation.Timings) -> AllocationTimes:
    wall, cpu, blocks = sorted(found.wall_s), sorted(found.cpu_s), sorted(found.blocks)
    return AllocationTimes(
        workload=workload,
        calls=kind,
        timed=len(wall),
        blocks_p50=blocks[len(blocks) // 2],
        wall_p50_us=_quantile(wall, 0.5) * 1e6,
        wall_p99_us=_quantile(wall, 0.99) * 1e6,
        cpu_p50_us=_quantile(cpu, 0.5) * 1e6,
        cpu_p99_us=_quantile(cpu, 0.99) * 1e6,
        per_block_ns=sum(wall) / sum(blocks) * 1e9,
    )


def _packed(workload: Workload, plan: PoolPlan) -> dict[str, float]:
    steps = 150 if plan.quick else 1_500
    setting = packing.PackingPlan(
        capacity_tokens=plan.blocks * allocation.BLOCK_TOKENS, block_tokens=allocation.BLOCK_TOKENS, steps=steps
    )
    blocks = packing.pack_blocks(workload, setting)
    slots = packing.pack_slots(workload, setting)
    found = {
        "utilisation_pct": blocks.utilisation * 100,
        "utilisation_tokens_pct": blocks.token_utilisation * 100,
        "fragmentation_mean_pct": blocks.internal * 100,
        "fragmentation_max_pct": blocks.internal_max * 100,
        "preemptions_count": blocks.preemptions,
        "slot_utilisation_tokens_pct": slots.token_utilisation * 100,
        "slot_internal_pct": slots.internal * 100,
        "slot_external_pct": slots.external * 100,
    }
    for tokens in BLOCK_TOKENS:
        found[f"last_block_loss_{tokens}_pct"] = packing.last_block_loss(workload, tokens) * 100
    return found


def _compacted(workload: Workload, plan: PoolPlan) -> dict[str, float]:
    setting = compaction.CompactionPlan(large_blocks=plan.blocks // 4, **({"calls": 200} if plan.quick else {}))
    found = compaction.run(workload, setting)
    name = workload.name
    return {
        f"external_before_{name}_pct": found.external_before * 100,
        f"external_after_{name}_pct": found.external_after * 100,
        f"compaction_moves_{name}_count": found.moves,
        f"compaction_moved_{name}_pct": found.moved_of_occupied * 100,
        f"compaction_step_{name}_p50_ms": _quantile(found.step_s, 0.5) * 1e3,
        f"mixed_alloc_{name}_p50_us": _quantile(found.mixed_alloc_s, 0.5) * 1e6,
        f"mixed_alloc_{name}_p99_us": _quantile(found.mixed_alloc_s, 0.99) * 1e6,
        f"mixed_refused_{name}_count": found.mixed_refused,
    }


def _parts(metrics: dict[str, float]) -> list[tuple[str, str, float]]:
    return [(*name.rsplit("_", 1), value) for name, value in metrics.items()]  # type: ignore[misc]


def _quantile(sorted_s: Sequence[float], q: float) -> float:
    """Return the q-quantile of sorted values (nearest rank); 0 of none."""
    return sorted_s[min(len(sorted_s) - 1, int(q * len(sorted_s)))] if sorted_s else 0.0
