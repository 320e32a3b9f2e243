"""Runs of 1, 2, 4, ... units in one region: what lets blocks of several sizes share memory.

A run of order ``k`` is ``2**k`` units and starts at a multiple of that; two halves of the same larger run are buddies,
and two free buddies can become that larger run again. The textbook merges on every ``free``. Here merging waits until
a larger run is wanted and missing: an engine frees blocks of a size in order to allocate blocks of the same size, so
almost every merge would be undone by a split. Both calls then move whole lists at C speed (about 20 ns a run), and a
merge walks the free runs once: O(free runs), and seldom.

Rejected: first fit over sorted extents (it fragments, and a free costs a search), one region for each size (what one
size has free, another can't use).
"""

from collections.abc import Sequence

from kvcontrol.core.integrity import must
from kvcontrol.kv_runtime.errors import AllocationError
from kvcontrol.kv_runtime.refusal import NoSpace, Shortage


class BuddyAllocator:
    """Hands out aligned runs of ``range(units)``, each to one owner at a time. Not thread-safe.

    ``units`` need not be a power of two: the region is cut into the largest runs that fit.
    """

    def __init__(self, units: int) -> None:
        if units <= 0:
            raise AllocationError(f"a region of {units} units; it needs at least 1")
        self.units = units
        self.max_order = units.bit_length() - 1
        self._free: list[list[int]] = [[] for _ in range(self.max_order + 1)]
        self._used: list[set[int]] = [set() for _ in range(self.max_order + 1)]
        self._freed = [False] * (self.max_order + 1)
        """Whether runs of an order were freed since its buddies were last sought."""
        self.used_units = 0
        self._give_back(0, units)

    @property
    def free_units(self) -> int:
        """Units in no handed-out run; ``used_units + free_units == units`` always."""
        return self.units - self.used_units

    def available(self, order: int) -> int:
        """Return how many runs of an order could be handed out; merges what can be merged."""
        self._check(order)
        self._merge(self.max_order)
        return self._count(order)

    def allocate(self, count: int, *, order: int) -> list[int] | NoSpace:
        """Hand out ``count`` runs of an order, by their first units, or none and say why.

        A refusal is ``FRAGMENTED`` where the free units would do if they lay together. Runs of the very size are taken
        first, then merged ones, then parts of larger ones: those are kept as long as possible.
        """
        self._check(order)
        if count < 0:
            raise AllocationError(f"{count} runs asked for; allowed is 0 or more")
        free = self._free[order]
        if count > len(free):
            self._merge(order)
            if count > self._count(order):
                shortage = Shortage.FRAGMENTED if count << order <= self.free_units else Shortage.FULL
                return NoSpace(wanted=count, available=self._count(order), shortage=shortage)
            self._split(order, count)
        if count == 0:
            return []
        starts = free[: -count - 1 : -1]
        del free[-count:]
        self._used[order].update(starts)
        self.used_units += count << order
        return starts

    def free(self, starts: Sequence[int], *, order: int) -> None:
        """Take runs back. ``AllocationError``, and no change, if one isn't out at that order or is named twice."""
        self._check(order)
        used = self._used[order]
        before = len(used)
        if not used.issuperset(starts):
            strange = next(start for start in starts if start not in used)
            raise AllocationError(f"no run of order {order} at {strange} is in use (freed twice, or never allocated)")
        used.difference_update(starts)
        if before - len(used) != len(starts):
            used.update(starts)
            raise AllocationError("a run is named twice in one call of free")
        self._free[order].extend(reversed(starts))
        self._freed[order] = True
        self.used_units -= len(starts) << order

    def take(self, start: int, *, order: int) -> None:
        """Hand out one given run: for compaction and restarts. O(free runs).

        ``AllocationError`` if it isn't free as a whole, or is no run of that order.
        """
        self._check(order)
        if start < 0 or start & ((1 << order) - 1) or start + (1 << order) > self.units:
            raise AllocationError(f"{start} is no run of order {order} in a region of {self.units} units")
        self._merge(self.max_order)
        for larger in range(order, self.max_order + 1):
            base = start >> larger << larger
            if base in self._free[larger]:
                self._free[larger].remove(base)
                self._give_back(base, start)
                self._give_back(start + (1 << order), base + (1 << larger))
                self._used[order].add(start)
                self.used_units += 1 << order
                return
        raise AllocationError(f"the run of order {order} at {start} isn't free")

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other. O(units)."""
        owner = bytearray(self.units)
        for out, runs_of in ((0, self._free), (1, self._used)):
            for order, runs in enumerate(runs_of):
                for start in runs:
                    end = start + (1 << order)
                    must(start % (1 << order) == 0 and end <= self.units, f"{start} is no run of order {order}")
                    must(not any(owner[start:end]), f"a unit of the run of order {order} at {start} has two owners")
                    owner[start:end] = bytes([1 + out]) * (1 << order)
        must(0 not in owner, "a unit is lost")
        must(owner.count(2) == self.used_units, "used_units is not what is in use")

    def _check(self, order: int) -> None:
        if not 0 <= order <= self.max_order:
            raise AllocationError(f"order {order} in a region of orders 0 to {self.max_order}")

    def _count(self, order: int) -> int:
        return sum(len(self._free[larger]) << (larger - order) for larger in range(order, self.max_order + 1))

    def _merge(self, up_to: int) -> None:
        """Join free buddies of all orders below ``up_to``."""
        for order in range(up_to):
            if not self._freed[order]:
                continue
            self._freed[order] = False
            runs, size = self._free[order], 1 << order
            there = set(runs)
            lower = [start for start in runs if not start & size and start + size in there]
            if lower:
                there.difference_update(lower)
                there.difference_update([start + size for start in lower])
                self._free[order] = [start for start in runs if start in there]
                self._free[order + 1].extend(lower)
                self._freed[order + 1] = True

    def _split(self, order: int, wanted: int) -> None:
        """Cut larger runs, the smallest first, until ``wanted`` runs of ``order`` are free."""
        free = self._free[order]
        for larger in range(order + 1, self.max_order + 1):
            runs = self._free[larger]
            while runs and len(free) < wanted:
                start = runs.pop()
                end = start + (1 << larger)
                cut = min(end, start + ((wanted - len(free)) << order))
                self._give_back(cut, end)
                free.extend(reversed(range(start, cut, 1 << order)))

    def _give_back(self, start: int, end: int) -> None:
        """Put the units from ``start`` up to ``end`` on the lists, in the largest aligned runs."""
        while start < end:
            order = (end - start).bit_length() - 1
            if start:
                order = min(order, (start & -start).bit_length() - 1)
            self._free[order].append(start)
            start += 1 << order
