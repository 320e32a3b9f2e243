"""Which waiting request of a simulated engine begins: the next one, once there are blocks for all of its prompt."""

from engines.sim.counters import Counters
from engines.sim.pool import PrefixPool
from engines.sim.profile import EngineShape
from engines.sim.sequence import SimSequence
from engines.sim.sequence_blocks import SequenceBlocks
from engines.sim.tiers import SimTiers
from engines.sim.waiting import SimWaiting
from kvcontrol.core.blocks import CacheTier


class Admission:
    """Gives requests their blocks: cached ones of HBM, free slots for the rest, and loads from the tiers below."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of one engine
        self,
        shape: EngineShape,
        pool: PrefixPool,
        tiers: SimTiers | None,
        blocks: SequenceBlocks,
        queue: SimWaiting,
        counters: Counters,
    ) -> None:
        self._size = shape.block_tokens
        self._pool = pool
        self._tiers = tiers
        self._blocks = blocks
        self._queue = queue
        self._counters = counters

    def next(self, now_s: float, running: int) -> tuple[SimSequence, float] | None:
        """Give the next request its blocks, and return it with the time when its loads are over; None without room for
        it. Somebody must wait.
        """
        sequence = self._queue.first(now_s, running)
        chain, size = sequence.request.chain, self._size
        keys = chain.keys
        limit = min((sequence.target - 1) // size, len(keys))
        hit = self._pool.cached.leading(keys, limit)
        slots = self._slots(sequence, hit, limit)
        if slots is None:
            return None
        tiers = self._tiers
        plan = None if tiers is None else tiers.plan_load(chain, hit, limit, now_s)
        self._queue.started(sequence, now_s)
        if self._blocks.shadows is not None:
            self._blocks.shadows.requested(keys[:limit])
        sequence.attached, sequence.own = hit, slots
        sequence.computed = hit * size
        found = {CacheTier.HBM: hit * size} if hit else {}
        ready_s = now_s
        if plan is not None and tiers is not None:
            loaded = tiers.load(plan, slots[: len(plan.block_ids)], now_s)
            if loaded.blocks:
                last = hit + loaded.blocks
                self._blocks.attach(sequence, last)
                sequence.computed = last * size
                found |= {tier: blocks * size for tier, blocks in loaded.by_tier.items()}
            ready_s = loaded.ready_s
        if not sequence.preempted:
            sequence.cached_tokens, sequence.cached_by_tier = sequence.computed, found
            self._counters.query_tokens += sequence.request.prompt_tokens
            self._counters.hit_tokens += hit * size
        return sequence, ready_s

    def _slots(self, sequence: SimSequence, hit: int, limit: int) -> list[int] | None:
        """Hold the cached head of a prompt and take slots for the rest; None, and nothing is held, without room."""
        pool, keys = self._pool, sequence.request.chain.keys
        head = keys[:hit]
        rest = -(-sequence.target // self._size) - hit
        if rest > pool.available_blocks:
            return None
        pool.keep(head)  # before anything is evicted for the rest; without room it is let go again
        if rest > pool.available_blocks:
            pool.release(head)
            return None
        pool.requested(keys[:limit], block_tokens=self._size, prompt_tokens=sequence.target)
        pool.use(head)
        pool.release(head)  # one of its two holds
        slots = pool.take(rest, keys[hit:limit])
        if slots is None:
            raise AssertionError(f"{rest} blocks can't be had of {pool.available_blocks} available ones")
        return slots
