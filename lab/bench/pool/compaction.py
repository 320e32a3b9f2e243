"""What compaction gives a region that three precisions share: BF16, FP8 and INT4 blocks, four, two and one unit large.

Paths of a trace's lengths, each in a random precision, fill the region; a tenth of them stay pinned, a random half of
the other blocks is dropped, and the rest stays cached. External fragmentation is that of ``KVPool``, for BF16 blocks.
Compaction then runs in steps of at most 64 moves until nothing is gained. Moves are metadata here: what copying costs
is the migrator's to measure. Last, allocations of all three kinds are timed in the full region, with their evictions.
"""

import random
import time
from dataclasses import dataclass

from kvcontrol.core.blocks import CacheTier, KVFormat
from kvcontrol.kv_policy.lru import LruPolicy
from kvcontrol.kv_runtime.refusal import NoSpace
from lab.bench.pool.lengths import Workload
from lab.research.pool.defrag import Compactor
from lab.research.pool.pool import KVPool
from lab.research.pool.space import BlockRegion, BlockSpec

BLOCK_TOKENS = 64
_KIB = 1024
_TOKEN_KIB = {KVFormat.BF16: 56, KVFormat.FP8: 28, KVFormat.INT4: 14}
SPECS = tuple(
    BlockSpec(kv_format=kind, tokens=BLOCK_TOKENS, size_bytes=BLOCK_TOKENS * kib * _KIB)
    for kind, kib in _TOKEN_KIB.items()
)
_PINNED_SHARE = 0.1
_LONGEST_BLOCKS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """The region in BF16 blocks, the bound of a step, and how many allocations are timed."""

    large_blocks: int = 4_096
    step_moves: int = 64
    calls: int = 2_000
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """External fragmentation before and after, the moves in between, and seconds: sorted, one for each step or call."""

    external_before: float
    external_after: float
    occupied: float
    moves: int
    moved_of_occupied: float
    step_s: list[float]
    mixed_alloc_s: list[float]
    mixed_refused: int


def run(workload: Workload, plan: CompactionPlan) -> Compaction:
    """Fragment a region, compact it, then allocate in it."""
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    region = BlockRegion(plan.large_blocks * SPECS[0].size_bytes, SPECS)
    pool = KVPool(tier=CacheTier.HBM, space=region, policy=LruPolicy())
    lengths = workload.endless()

    def blocks_of_next() -> int:
        return min(_LONGEST_BLOCKS, -(-sum(next(lengths)) // BLOCK_TOKENS))

    paths = []
    while not isinstance(path := pool.allocate(blocks_of_next(), rng.choice(SPECS)), NoSpace):
        paths.append(path.block_ids)
    for blocks in paths:
        if rng.random() < _PINNED_SHARE:
            continue
        keep = [block for block in blocks if rng.random() < 0.5]  # noqa: PLR2004 - a half, as said above
        kept = set(keep)
        pool.free([block for block in blocks if block not in kept])
        pool.release(keep)
    before = pool.get_fragmentation().external_ratio
    occupied = pool.get_utilization().occupied_ratio
    compactor = Compactor(region, movable=pool.is_cached)
    step_s: list[float] = []
    moved_units = moves_done = 0
    while True:
        started = time.perf_counter()
        moves = compactor.begin(SPECS[0], max_moves=plan.step_moves)
        for move in moves:
            compactor.finish(move, copied=True)
        if not moves:
            break
        step_s.append(time.perf_counter() - started)
        moves_done += len(moves)
        moved_units += sum(1 << move.order for move in moves)
    after = pool.get_fragmentation().external_ratio
    took_s, refused = _allocations(pool, rng, [blocks_of_next() for _ in range(plan.calls)])
    return Compaction(
        external_before=before,
        external_after=after,
        occupied=occupied,
        moves=moves_done,
        moved_of_occupied=moved_units / (occupied * region.units),
        step_s=sorted(step_s),
        mixed_alloc_s=sorted(took_s),
        mixed_refused=refused,
    )


def _allocations(pool: KVPool, rng: random.Random, counts: list[int]) -> tuple[list[float], int]:
    """Time allocations of a path each, cached right after; only those that found the region at least 95 % occupied."""
    took_s: list[float] = []
    refused = 0
    for count in [*counts, *counts]:
        full = pool.get_utilization().occupied_ratio >= 0.95  # noqa: PLR2004 - as said above
        spec = rng.choice(SPECS)
        started = time.perf_counter()
        path = pool.allocate(count, spec)
        ended = time.perf_counter()
        if isinstance(path, NoSpace):
            refused += 1
            continue
        if full:
            took_s.append(ended - started)
        pool.release(path.block_ids)
    return took_s, refused
