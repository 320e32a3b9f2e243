"""How long an allocation takes in a full pool, with the eviction of what it needs in the same call.

Replayed are a trace's requests: each prompt is allocated in chunks of at most 8,192 tokens (what one engine step
computes), then its answer block by block, many requests taking turns. Ended requests stay cached, so that after the
warm-up nearly every call evicts exactly as many blocks as it gets, by ``LruPolicy``. **One allocation is one such
call** of ``KVPool.allocate``. Prompts allocated whole, in one call each, are timed in a second run, and the same stream
through ``BlockManager`` in a third.

Wall time, one call at a time, with the garbage collector on as in production; the CPU time that the thread spent is
measured around it, for machines that do other work besides (it holds the cost of reading the clocks, ``timer_ns``).
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvcontrol.core.blocks import CacheTier, KVFormat
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.lru import LruPolicy
from kvcontrol.kv_runtime.refusal import NoSpace
from lab.bench.pool.lengths import Workload
from lab.research.pool.block_manager import BlockManager, Extension
from lab.research.pool.pool import AllocationResult, KVPool
from lab.research.pool.space import BlockSpec, SlotSpace

BLOCK_TOKENS = 64
CHUNK_BLOCKS = 8_192 // BLOCK_TOKENS
_PINNED_SHARE = 0.6
"""Of the pool, for running requests; the rest is cached. With more, a trace's longest requests would be refused."""
SPEC = BlockSpec(kv_format=KVFormat.BF16, tokens=BLOCK_TOKENS, size_bytes=BLOCK_TOKENS * 56 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationPlan:
    """Blocks of the pool, and how many calls are timed after it is full."""

    blocks: int = 16_384
    calls: int = 30_000
    seed: int = 0


@dataclass(slots=True)
class Timings:
    """Of each timed call: seconds by the clock and by the thread's CPU time, and how many blocks it got."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    occupancy_min: float = 1.0
    evicting: int = 0

    def of(self, wanted: Callable[[int], bool]) -> "Timings":
        """Return the calls whose number of blocks is wanted."""
        chosen = [place for place, blocks in enumerate(self.blocks) if wanted(blocks)]
        return Timings(
            wall_s=[self.wall_s[place] for place in chosen],
            cpu_s=[self.cpu_s[place] for place in chosen],
            blocks=[self.blocks[place] for place in chosen],
        )


@dataclass(slots=True)
class _Running:
    name: str
    to_come: deque[int]
    """Blocks of the calls that are left."""
    blocks: list[BlockId]


class _PoolCalls:
    """Calls on the pool itself."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool

    def allocate(self, running: "_Running", count: int) -> AllocationResult | NoSpace:
        del running
        return self.pool.allocate(count)

    def end(self, running: "_Running") -> None:
        self.pool.release(running.blocks)


class _ManagerCalls:
    """The same through a block manager."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._manager = BlockManager(pool)

    def allocate(self, running: "_Running", count: int) -> AllocationResult | Extension | NoSpace:
        if running.blocks:
            return self._manager.append(running.name, count * BLOCK_TOKENS)
        return self._manager.allocate(running.name, count * BLOCK_TOKENS)

    def end(self, running: "_Running") -> None:
        self._manager.free(running.name)


def time_pool(workload: Workload, plan: AllocationPlan, *, chunk_blocks: int = CHUNK_BLOCKS) -> Timings:
    """Time ``KVPool.allocate`` over a workload's stream of calls."""
    return _stream(_requests(workload, chunk_blocks), plan, _PoolCalls(_pool(plan)))


def time_manager(workload: Workload, plan: AllocationPlan) -> Timings:
    """Time ``BlockManager.allocate`` and ``append`` over the same stream."""
    return _stream(_requests(workload, CHUNK_BLOCKS), plan, _ManagerCalls(_pool(plan)))


def timer_ns() -> float:
    """Return what reading the clocks adds to a call's CPU time: the median of an empty call."""
    took = []
    for _ in range(2_000):
        started = time.thread_time_ns()
        inner = time.perf_counter()
        time.perf_counter() - inner
        took.append(time.thread_time_ns() - started)
    return float(sorted(took)[len(took) // 2])


def _pool(plan: AllocationPlan) -> KVPool:
    return KVPool(tier=CacheTier.HBM, space=SlotSpace(SPEC, plan.blocks), policy=LruPolicy())


def _requests(workload: Workload, chunk_blocks: int) -> Iterator[_Running]:
    for number, length in enumerate(workload.endless()):
        prompt = -(-length.prompt // BLOCK_TOKENS)
        whole = -(-(length.prompt + length.answer) // BLOCK_TOKENS)
        calls = [min(chunk_blocks, prompt - start) for start in range(0, prompt, chunk_blocks)]
        yield _Running(f"r{number}", deque(calls + [1] * (whole - prompt)), [])


def _stream(requests: Iterator[_Running], plan: AllocationPlan, calls: _PoolCalls | _ManagerCalls) -> Timings:
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    clock, cpu = time.perf_counter, time.thread_time_ns
    pool, allocate = calls.pool, calls.allocate
    coming = next(requests)
    needed = sum(coming.to_come)
    running: list[_Running] = []
    pinned = 0
    """Blocks that running requests have or will have."""
    timings = Timings()
    full = False
    while len(timings.wall_s) < plan.calls:
        while pinned + needed <= _PINNED_SHARE * plan.blocks or not running:
            running.append(coming)
            pinned += needed
            coming = next(requests)
            needed = sum(coming.to_come)
        place = rng.randrange(len(running))
        chosen = running[place]
        count = chosen.to_come.popleft()
        occupancy = pool.get_utilization().occupied_ratio
        full = full or occupancy >= 0.995  # noqa: PLR2004 - the warm-up ends when the pool has filled
        evictions = pool.counters.evictions
        cpu_started = cpu()
        started = clock()
        result = allocate(chosen, count)
        took_s = clock() - started
        cpu_s = (cpu() - cpu_started) / 1e9
        if isinstance(result, NoSpace):
            raise AssertionError(f"{result} in a pool with room for what runs")  # noqa: TRY004 - the benchmark is wrong
        chosen.blocks += result.block_ids
        if full:
            timings.wall_s.append(took_s)
            timings.cpu_s.append(cpu_s)
            timings.blocks.append(count)
            timings.occupancy_min = min(timings.occupancy_min, occupancy)
            timings.evicting += pool.counters.evictions - evictions
        if not chosen.to_come:
            running[place] = running[-1]
            running.pop()
            pinned -= len(chosen.blocks)
            calls.end(chosen)
    return timings
