"""One tier's blocks: which are free, which hold KV that somebody uses, and which hold KV that might be of use again.

        allocate             release                hold
    free ─────▶ pinned (1 reference or more) ─────▶ cached ─────▶ pinned
     ▲             │ free                             │ evicted, or discarded
     └─────────────┴──────────────────────────────────┘

Every block is in exactly one of the three states, so ``free + cached + pinned == capacity`` always. Cached blocks are
the eviction policy's; an allocation that finds too few free ones takes what the policy gives up, in the same call.
Blocks are named in *paths*, heads before tails, as the policy wants them.

An eviction costs a block one deletion here. The cached ones are a dictionary, which has them side by side in memory in
the order in which they came, as those go that come to be victims; a set scatters them, and what left stays in its way:
three times as slow, though it takes no Python statement a block. Rejected: a queue of free and cached blocks in one
(fast, but then the order of eviction is the queue's, and policies can't be exchanged).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NewType

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.core.integrity import must
from kvcontrol.kv_policy.eviction import EvictionPolicy, PolicyContext
from kvcontrol.kv_runtime.errors import AllocationError
from kvcontrol.kv_runtime.refusal import NoSpace, Shortage
from kvcontrol.kv_runtime.slab import SlabAllocator
from lab.research.pool.defrag import plan_clearing
from lab.research.pool.space import BlockSpace, BlockSpec, SlotSpace
from lab.research.pool.usage import Fragmentation, PoolCounters, Utilization


class AllocationResult(NamedTuple):
    """Blocks that are the caller's now, with one reference each. A tuple, as one is made for every allocation."""

    block_ids: tuple[BlockId, ...]
    tier: CacheTier


Mark = NewType("Mark", int)
"""Stands for what a block holds now; never given to two contents."""

OnEnded = Callable[[Sequence[BlockId], str], None]
"""Told which blocks' contents end and why, before their space is used again: evicted, cleared, discarded or freed.

An index that believes it can't name a block that holds something else. Must not raise or call the pool.
"""

_IN_VAIN = 4
"""How many victims may go in vain for each large block that is wanted."""

_QUESTIONS = 1_024
"""How many are kept."""

FREED = "freed by who had it pinned"
DISCARDED = "discarded"


def ignore(blocks: Sequence[BlockId], reason: str) -> None:
    """Take note of nothing: for pools whose contents nobody indexes."""


class KVPool:
    """The blocks of one tier, with the eviction of cached ones on the allocation path. Not thread-safe.

    ``evict_at_least`` blocks leave whenever any must: more than 1 makes most allocations find free ones, and leaves up
    to that many empty. Every refused misuse (``AllocationError``) changes nothing.
    """

    def __init__(
        self,
        *,
        tier: CacheTier,
        space: BlockSpace,
        policy: EvictionPolicy,
        on_ended: OnEnded = ignore,
        evict_at_least: int = 1,
    ) -> None:
        if evict_at_least < 1:
            raise AllocationError(f"evict_at_least is {evict_at_least}; allowed is 1 or more")
        self.tier = tier
        self.space = space
        self.counters = PoolCounters()
        self._policy = policy
        self._on_ended = on_ended
        self._evict_at_least = evict_at_least
        self._slab = space.slab if isinstance(space, SlotSpace) else None
        """Where blocks are alike: asked directly, as each call on the way costs as much as a step."""
        self._default = space.specs[0]
        self._slot_bytes = self._default.size_bytes
        self._capacity_blocks = space.capacity_bytes // min(spec.size_bytes for spec in space.specs)
        self._questions: dict[int, PolicyContext] = {}
        """By blocks that are wanted: what a full pool asks its policy, again and again."""
        self._cached: dict[BlockId, None] = {}
        """Those that came first are first: see the module's text."""
        self._known: set[BlockId] = set()
        """Pinned blocks that the policy knows and holds, because they were cached before."""
        self._further: dict[BlockId, int] = {}
        """References of pinned blocks beyond the first."""
        self._cached_bytes = 0
        self._marks: dict[BlockId, Mark] = {}
        self._next_mark = 0

    def allocate(self, count: int, spec: BlockSpec | None = None) -> AllocationResult | NoSpace:
        """Pin ``count`` new blocks (of the space's first kind by default), evicting cached ones as far as needed.

        All or nothing. A refusal that is ``FULL`` evicted nothing, unless the policy gave up less than it holds;
        one that is ``FRAGMENTED`` may have evicted up to the bytes that were asked for, and compaction may help it.
        O(count), and O(pool) where sizes are mixed and a large block has to be made room for.
        """
        kind = self._default if spec is None else spec
        slab = self._slab
        blocks = self._allocate_mixed(kind, count) if slab is None else self._allocate_alike(slab, kind, count)
        counters = self.counters
        if isinstance(blocks, NoSpace):
            counters.refusals += 1
            return blocks
        counters.allocations += 1
        counters.allocated_blocks += count
        return AllocationResult(tuple(blocks), self.tier)

    def free(self, path: Sequence[BlockId]) -> None:
        """Drop one reference to pinned blocks; those that had no other are free, their contents forgotten."""
        last = self._dropped(path)
        if not self._known.isdisjoint(last):
            known = [block for block in last if block in self._known]
            self._policy.remove(known)
            self._known.difference_update(known)
        self._end(last, FREED)
        self.space.free(last)

    def release(self, path: Sequence[BlockId]) -> None:
        """Drop one reference to pinned blocks; those that had no other are cached until they are evicted."""
        last = self._dropped(path)
        known = self._known
        if known.isdisjoint(last):
            self._policy.insert(last)
        else:
            old = [block for block in last if block in known]
            self._policy.insert([block for block in last if block not in known])
            self._policy.release(old)  # after the insertion: the old ones are heads, and leave later
            known.difference_update(old)
        cached = self._cached
        for block in reversed(last):
            cached[block] = None
        self._cached_bytes += self.space.reserved_bytes(last)

    def hold(self, path: Sequence[BlockId]) -> None:
        """Add a reference to resident blocks; cached ones are pinned by it, and safe from eviction."""
        cached = self._cached
        fresh = path
        if not cached.keys() >= set(path):
            self._must_be_resident(path)
            fresh = [block for block in path if block in cached]
        _must_be_distinct(path)
        for block in fresh:
            del cached[block]
        self._known.update(fresh)
        self._policy.hold(fresh)
        self._cached_bytes -= self.space.reserved_bytes(fresh)
        if len(fresh) != len(path):
            new = set(fresh)
            for block in path:
                if block not in new:
                    self._further[block] = self._further.get(block, 0) + 1

    def discard(self, blocks: Sequence[BlockId]) -> None:
        """Free cached blocks whose contents are of no use any more."""
        if not self.are_cached(blocks):
            strange = next(block for block in blocks if block not in self._cached)
            raise AllocationError(f"block {strange} is discarded but isn't cached")
        _must_be_distinct(blocks)
        for block in blocks:
            del self._cached[block]
        self._cached_bytes -= self.space.reserved_bytes(blocks)
        self._policy.remove(blocks)
        self._end(blocks, DISCARDED)
        self.space.free(blocks)

    def is_cached(self, block: BlockId) -> bool:
        """Whether a block is resident and nobody has it pinned: the policy may evict it, compaction may move it."""
        return block in self._cached

    def are_cached(self, blocks: Iterable[BlockId]) -> bool:
        """Whether that holds for all of them."""
        return all(map(self._cached.__contains__, blocks))

    def references(self, block: BlockId) -> int:
        """Return how many references a block has: 0 if it is cached or free."""
        if block in self._cached or not self.space.holds((block,)):
            return 0
        return 1 + self._further.get(block, 0)

    def are_shared(self, blocks: Iterable[BlockId]) -> bool:
        """Whether any of them has more than one reference."""
        return bool(self._further) and not self._further.keys().isdisjoint(blocks)

    def mark(self, path: Sequence[BlockId]) -> list[Mark]:
        """Return a mark for each resident block, by which its contents can be known again after it was let go."""
        self._must_be_resident(path)
        marks = []
        for block in path:
            mark = self._marks.get(block)
            if mark is None:
                mark = self._marks[block] = Mark(self._next_mark)
                self._next_mark += 1
            marks.append(mark)
        return marks

    def still_holds(self, block: BlockId, mark: Mark) -> bool:
        """Whether a block holds what it held when it was marked, without having been free or evicted in between."""
        return self._marks.get(block) == mark

    def available(self, spec: BlockSpec | None = None) -> int:
        """Return how many blocks could be allocated without evicting any."""
        return self.space.available(self._default if spec is None else spec)

    def get_utilization(self) -> Utilization:
        """Return the bytes of each state. O(1)."""
        capacity, free = self.space.capacity_bytes, self.space.free_bytes
        return Utilization(
            capacity_bytes=capacity,
            free_bytes=free,
            cached_bytes=self._cached_bytes,
            pinned_bytes=capacity - free - self._cached_bytes,
        )

    def get_fragmentation(self) -> Fragmentation:
        """What rounding and scattering lose (see ``Fragmentation``). O(pool) where sizes are mixed, else O(1)."""
        taken = self.space.capacity_bytes - self.space.free_bytes
        largest = max(self.space.specs, key=self.space.order)
        together = 0
        if self._slab is None:
            run_bytes = _run_bytes(self.space, largest)
            together = self.space.free_bytes // run_bytes
        return Fragmentation(
            internal_ratio=1 - self.space.stored_bytes / taken if taken else 0.0,
            external_ratio=1 - self.space.available(largest) / together if together else 0.0,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other. O(pool)."""
        self.space.check_integrity()
        must(self.space.holds(self._cached), "a cached block is free")
        must(self.space.holds(self._known) and self._known.isdisjoint(self._cached), "a held block isn't pinned")
        must(self.space.holds(self._further), "a free block has references")
        must(self._cached.keys().isdisjoint(self._further), "a cached block has references")
        must(all(more > 0 for more in self._further.values()), "a count of references is not positive")
        must(len(self._policy) == len(self._cached) + len(self._known), "the policy knows other blocks than the pool")
        must(self._cached_bytes == self.space.reserved_bytes(list(self._cached)), "cached_bytes is not what is cached")

    def _must_be_resident(self, path: Iterable[BlockId]) -> None:
        if not self.space.holds(path):
            strange = next(block for block in path if not self.space.holds((block,)))
            raise AllocationError(f"block {strange} is not resident (freed or evicted already, or never allocated)")

    def _dropped(self, path: Sequence[BlockId]) -> Sequence[BlockId]:
        """Drop one reference to each block, and return those that have none left."""
        self._must_be_resident(path)
        if not self._cached.keys().isdisjoint(path):
            strange = next(block for block in path if block in self._cached)
            raise AllocationError(f"block {strange} is released but nobody has it pinned (released twice)")
        _must_be_distinct(path)
        further = self._further
        if not further or further.keys().isdisjoint(path):
            return path
        last = []
        for block in path:
            more = further.get(block)
            if more is None:
                last.append(block)
            elif more == 1:
                del further[block]
            else:
                further[block] = more - 1
        return last

    def _evict(self, wanted: int) -> tuple[BlockId, ...]:
        """Return blocks that the policy gave up: no longer cached, not yet free."""
        # The calls of a few lines are written out here, as each costs as much as what it does.
        slab, cached = self._slab, self._cached
        context = self._questions.get(wanted) if slab is not None and not slab.available else None
        victims, reason = self._policy.select_victims(self._question(wanted) if context is None else context)
        gone = len(victims)
        try:
            for block in victims:
                del cached[block]
        except KeyError:
            raise AssertionError(f"policy {self._policy.name} evicts blocks that aren't cached") from None
        self._cached_bytes -= self.space.reserved_bytes(victims) if slab is None else gone * self._slot_bytes
        counters = self.counters
        counters.evictions += 1
        counters.evicted_blocks += gone
        if self._marks:
            self._unmark(victims)
        if gone:
            self._on_ended(victims, reason)
        return victims

    def _end(self, blocks: Sequence[BlockId], reason: str) -> None:
        """The contents of blocks end."""
        if self._marks:
            self._unmark(blocks)
        if blocks:
            self._on_ended(blocks, reason)

    def _unmark(self, blocks: Sequence[BlockId]) -> None:
        for block in self._marks.keys() & blocks:
            del self._marks[block]

    def _question(self, wanted: int) -> PolicyContext:
        used = self.space.resident_blocks
        context = PolicyContext(self.tier, wanted, used, self._capacity_blocks)
        if used == self._capacity_blocks and len(self._questions) < _QUESTIONS:
            self._questions[wanted] = context
        return context

    def _allocate_alike(self, slab: SlabAllocator, spec: BlockSpec, count: int) -> Sequence[BlockId] | NoSpace:
        """Blocks are alike: the evicted ones are the new ones, without a detour over the free."""
        if spec is not self._default:
            self.space.order(spec)  # which refuses what isn't equal to it
        available = slab.available
        missing = count - available
        if missing <= 0:
            return self.space.allocate(spec, count)
        evictable = len(self._cached)
        if missing > evictable:
            return NoSpace(wanted=count, available=available + evictable)
        least = self._evict_at_least
        victims = self._evict(missing if missing >= least else max(missing, min(least, evictable)))
        if len(victims) != missing:
            self.space.free(victims)
            return self.space.allocate(spec, count)
        if not available:
            return victims
        blocks = self.space.allocate(spec, available)
        return blocks if isinstance(blocks, NoSpace) else [*blocks, *victims]

    def _allocate_mixed(self, spec: BlockSpec, count: int) -> list[BlockId] | NoSpace:
        """Evict by the policy until the bytes suffice, then, if they lie scattered, what stands in the way."""
        blocks = self.space.allocate(spec, count)
        if not isinstance(blocks, NoSpace):
            return blocks
        if count * _run_bytes(self.space, spec) > self.space.free_bytes + self._cached_bytes:
            return blocks
        while blocks.shortage is Shortage.FULL:
            victims = self._evict(max(count - blocks.available, self._evict_at_least))
            if not victims:
                return blocks
            self.space.free(victims)
            blocks = self.space.allocate(spec, count)
            if not isinstance(blocks, NoSpace):
                return blocks
        return self._clear(spec, blocks)

    def _clear(self, spec: BlockSpec, refused: NoSpace) -> list[BlockId] | NoSpace:
        """Make runs for blocks that are larger than the holes.

        What the policy gives up next goes with all that stands in the same place, unless something there is pinned:
        then it went in vain. After some of those the whole region is searched for what costs least, and found or not.
        """
        order = self.space.order(spec)
        in_vain = _IN_VAIN * refused.wanted
        reason = f"stands where {refused.wanted} blocks of {spec.size_bytes} bytes are to lie"
        while in_vain > 0:
            victims = self._evict(refused.wanted - refused.available)
            if not victims:
                break
            gone = set(victims)
            for victim in victims:
                others = [block for block in self.space.neighbours(victim, order) if block not in gone]
                if self.are_cached(others):
                    gone.update(others)
                else:
                    in_vain -= 1
            cleared = list(gone.difference(victims))
            self._free_for_place(cleared, reason)
            self.space.free(victims)
            blocks = self.space.allocate(spec, refused.wanted)
            if not isinstance(blocks, NoSpace):
                return blocks
            refused = blocks
        planned = plan_clearing(
            self.space.placed(),
            units=self.space.units,
            order=order,
            count=refused.wanted,
            evictable=self.is_cached,
        )
        if isinstance(planned, NoSpace):
            return planned
        self._free_for_place(planned, reason)
        return self.space.allocate(spec, refused.wanted)

    def _free_for_place(self, blocks: list[BlockId], reason: str) -> None:
        self._policy.remove(blocks)
        for block in blocks:
            del self._cached[block]
        self._cached_bytes -= self.space.reserved_bytes(blocks)
        self.counters.evicted_blocks += len(blocks)
        self.counters.cleared_blocks += len(blocks)
        self._end(blocks, reason)
        self.space.free(blocks)


def _must_be_distinct(path: Sequence[BlockId]) -> None:
    if len(set(path)) != len(path):
        raise AllocationError("a block is named twice in one call")


def _run_bytes(space: BlockSpace, spec: BlockSpec) -> int:
    return space.capacity_bytes // space.units << space.order(spec)
