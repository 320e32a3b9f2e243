"""How much was used within the last minute, counted by the second.

A bucket that refills continuously would let a burst of the whole limit and then some of it again within one minute, a
fixed window twice the limit around its edge. Here no 60 seconds ever see more than the limit: what was used in a second
counts until 60 seconds after that second's end, so at most a second too long. At most 61 numbers are held, however high
the limit.
"""

from collections import OrderedDict
from math import floor

WINDOW_S = 60
_LAST_S = WINDOW_S + 1


class SlidingWindow:
    """Counts of one thing for one tenant. Times only grow."""

    __slots__ = ("_slots", "_used")

    def __init__(self) -> None:
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._used = 0

    def used(self, now_s: float) -> int:
        """Return what counts now. O(seconds that have passed out of the window)."""
        slots = self._slots
        oldest = floor(now_s) - _LAST_S
        while slots and (first := next(iter(slots))) <= oldest:
            self._used -= slots.pop(first)
        return self._used

    def add(self, amount: int, now_s: float) -> int:
        """Count ``amount`` now, and return the slot that holds it."""
        slot = floor(now_s)
        self._slots[slot] = self._slots.get(slot, 0) + amount
        self._used += amount
        return slot

    def correct(self, slot: int, by: int) -> None:
        """Correct the count of a slot; no effect outside of the window."""
        if slot in self._slots:
            self._slots[slot] += by
            self._used += by

    def free_in_s(self, amount: int, limit: int, now_s: float) -> float:
        """Return the seconds until ``amount`` (at most ``limit``) fits, 0 when it does now."""
        excess = self.used(now_s) + amount - limit
        if excess <= 0:
            return 0.0
        for slot, count in self._slots.items():
            excess -= count
            if excess <= 0:
                return slot + _LAST_S - now_s
        return float(_LAST_S)

    def empty_in_s(self, now_s: float) -> float:
        """Return the seconds until the window is empty."""
        if not self.used(now_s) or not self._slots:
            return 0.0
        return next(reversed(self._slots)) + _LAST_S - now_s
