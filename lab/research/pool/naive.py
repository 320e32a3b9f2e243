"""Twins that are too slow and too plain to be wrong: the oracles of the tests."""

from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime.errors import AllocationError


class NaiveUnits:
    """``BuddyAllocator`` without cleverness: the owner of every unit, searched through each time.

    It doesn't choose places; it says how many runs fit, and follows what the other one chose. O(units) a call.
    """

    def __init__(self, units: int) -> None:
        self.owners: list[tuple[int, int] | None] = [None] * units

    @property
    def free_units(self) -> int:
        return self.owners.count(None)

    def available(self, order: int) -> int:
        """Return how many aligned runs of ``2**order`` units are wholly free."""
        size = 1 << order
        starts = range(0, len(self.owners) - size + 1, size)
        return sum(all(owner is None for owner in self.owners[start : start + size]) for start in starts)

    def take(self, start: int, *, order: int) -> None:
        """Own a run; ``AllocationError`` if any of it is owned, or it is no run of that order."""
        run = self.owners[start : start + (1 << order)]
        if start % (1 << order) or len(run) != 1 << order or any(owner is not None for owner in run):
            raise AllocationError(f"the run of order {order} at {start} isn't free")
        self.owners[start : start + (1 << order)] = [(start, order)] * (1 << order)

    def free(self, starts: Sequence[int], *, order: int) -> None:
        """Disown runs; ``AllocationError`` for one that isn't owned as such."""
        for start in starts:
            if self.owners[start] != (start, order):
                raise AllocationError(f"no run of order {order} at {start} is in use")
            self.owners[start : start + (1 << order)] = [None] * (1 << order)


class NaivePool:
    """A ``KVPool`` of equal blocks under LRU: a count of references for each pinned block, a list of cached ones.

    It doesn't choose new blocks' ids; it says what an allocation evicts, and follows what the other one chose.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.references: dict[BlockId, int] = {}
        self.cached: list[BlockId] = []
        """Oldest first."""

    @property
    def free_blocks(self) -> int:
        return self.capacity - len(self.references) - len(self.cached)

    def evicted_for(self, count: int) -> list[BlockId] | None:
        """Return what an allocation of ``count`` blocks must evict; None if it must be refused."""
        missing = max(0, count - self.free_blocks)
        return None if missing > len(self.cached) else self.cached[:missing]

    def allocate(self, blocks: Sequence[BlockId]) -> None:
        for victim in self.evicted_for(len(blocks)) or []:
            self.cached.remove(victim)
        for block in blocks:
            if block in self.references or block in self.cached:
                raise AllocationError(f"block {block} has an owner")
            self.references[block] = 1

    def drop(self, path: Sequence[BlockId], *, keep: bool) -> None:
        """Drop a reference to each; blocks without any are cached, tails older than heads, or free."""
        last = []
        for block in path:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                last.append(block)
        if keep:
            self.cached += reversed(last)

    def hold(self, path: Sequence[BlockId]) -> None:
        for block in path:
            if block in self.cached:
                self.cached.remove(block)
            self.references[block] = self.references.get(block, 0) + 1

    def discard(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            self.cached.remove(block)


class NaiveTokens:
    """A ``SlotLayout`` as the owner of every token slot, searched through each time. O(tokens) a call."""

    def __init__(self, capacity: int) -> None:
        self.owners: list[str | None] = [None] * capacity

    def holes(self) -> list[tuple[int, int]]:
        """Return start and length of each free run."""
        holes: list[tuple[int, int]] = []
        for place, owner in enumerate(self.owners):
            if owner is None:
                if holes and sum(holes[-1]) == place:
                    holes[-1] = (holes[-1][0], holes[-1][1] + 1)
                else:
                    holes.append((place, 1))
        return holes

    def allocate(self, request_id: str, reserve: int) -> int | None:
        """Return where the first hole that is large enough begins; None where none is."""
        for start, length in self.holes():
            if length >= reserve:
                self.owners[start : start + reserve] = [request_id] * reserve
                return start
        return None

    def free(self, request_id: str) -> None:
        self.owners = [None if owner == request_id else owner for owner in self.owners]
