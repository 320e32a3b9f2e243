"""Twins that are too slow and too plain to be wrong: the oracles of the tests."""

from collections.abc import Sequence

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


__all__ = ["NaiveUnits"]
