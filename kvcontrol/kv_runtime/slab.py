"""Slots of one size: the allocator of the tiers below HBM, and of pools with equal blocks.

Free slots stand on a stack, used ones in a set. A call moves its slots from one to the other with a handful of
operations that run at C speed, whatever their number (about 20 ns a slot), and the set finds every double free.

Rejected: a bitmap (each allocation scans for holes), a linked list through the slots (one Python step a slot, and the
slots' bytes belong to the backend).
"""

from collections.abc import Iterable, Sequence

from kvcontrol.core.integrity import must
from kvcontrol.kv_runtime.errors import AllocationError
from kvcontrol.kv_runtime.refusal import NoSpace


class SlabAllocator:
    """Hands out the slots of ``range(capacity)``, each to one owner at a time. Not thread-safe.

    A fresh allocator gives the lowest slots first, later the ones that were freed last.
    """

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise AllocationError(f"a slab of {capacity} slots; it needs at least 1")
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._used: set[int] = set()
        self.available = capacity
        """Slots that can be handed out; ``used + available == capacity`` always. Written here alone."""
        self._stale = False
        """Slots were taken out of the middle of the stack and still stand in it."""

    @property
    def used(self) -> int:
        """Slots that are handed out."""
        return len(self._used)

    def __contains__(self, slot: int) -> bool:
        """Whether a slot is handed out."""
        return slot in self._used

    def holds(self, slots: Iterable[int]) -> bool:
        """Whether all of them are handed out."""
        return self._used.issuperset(slots)

    def allocate(self, count: int) -> list[int] | NoSpace:
        """Allocate ``count`` distinct slots, or none with the reason. ``AllocationError`` for a negative count."""
        if count <= 0:
            if count < 0:
                raise AllocationError(f"{count} slots requested; allowed: 0 or more")
            return []
        if self._stale:
            self._settle()
        free = self._free
        if count > len(free):
            return NoSpace(wanted=count, available=len(free))
        slots = free[: -count - 1 : -1]
        del free[-count:]
        self._used.update(slots)
        self.available -= count
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Take slots back. ``AllocationError``, and no change, if one isn't handed out or is named twice."""
        if self._stale:
            self._settle()
        used = self._used
        before = len(used)
        if not used.issuperset(slots):
            strange = next(slot for slot in slots if slot not in used)
            raise AllocationError(f"slot {strange} is freed but isn't in use (freed twice, or never allocated)")
        used.difference_update(slots)
        if before - len(used) != len(slots):
            used.update(slots)
            raise AllocationError("a slot is named twice in one call of free")
        self._free.extend(reversed(slots))
        self.available += len(slots)

    def take(self, slot: int) -> None:
        """Mark a given slot as allocated, after a recovery. ``AllocationError`` if it is already.

        O(1); the first allocation or free after a row of these costs O(capacity) once.
        """
        if not 0 <= slot < self.capacity:
            raise AllocationError(f"slot {slot} of a slab with {self.capacity}")
        if slot in self._used:
            raise AllocationError(f"slot {slot} is in use already")
        self._used.add(slot)
        self.available -= 1
        self._stale = True

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other. O(capacity)."""
        self._settle()
        free = set(self._free)
        must(self.available == len(free), "other slots are available than are free")
        must(len(free) == len(self._free), "a slot is free twice")
        must(free.isdisjoint(self._used), "a slot is both free and in use")
        must(free | self._used == set(range(self.capacity)), "a slot is lost, or one from elsewhere came in")

    def _settle(self) -> None:
        used = self._used
        self._free = [slot for slot in self._free if slot not in used]
        self._stale = False
