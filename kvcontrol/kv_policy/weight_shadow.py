"""A cache of keys alone in two lines at one weight (``two_lines``), and what it won over LRU's of late.

``adaptive`` asks four of them at every sampled use, so ``use`` is ``TwoLines``'s steps written out in one function: a
third of the time. A test holds it to ``TwoLines``.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.kv_policy.eviction import ContentKey


class WeightShadow:
    """``ghosts`` keys for each that there is room for are remembered once they have left."""

    __slots__ = ("_again", "_ghosts", "_left", "_now", "_once", "_squares", "_weight", "lead", "won")

    def __init__(self, weight: float, *, ghosts: int) -> None:
        self._weight = weight
        self._ghosts = ghosts
        self._once: OrderedDict[ContentKey, int] = OrderedDict()
        self._again: OrderedDict[ContentKey, int] = OrderedDict()
        self._left: OrderedDict[ContentKey, None] = OrderedDict()
        self._now = 0
        self.lead = 0
        """Found more than by LRU's shadow in this period."""
        self.won = 0.0
        self._squares = 0.0

    @property
    def spread(self) -> float:
        """Return the root of the sum of the periods' squares, faded as ``won`` is."""
        return math.sqrt(self._squares)

    def find(self, prompt: Sequence[ContentKey]) -> int:
        """Return how many leading keys of a prompt are there. Nothing changes. O(keys)."""
        once, again = self._once, self._again
        for place, key in enumerate(prompt):
            if key not in again and key not in once:
                return place
        return len(prompt)

    def use(self, key: ContentKey, room: int) -> bool:
        """Use a key in a cache of so much room, and return whether it was there. O(1) amortised."""
        once, again = self._once, self._again
        self._now = now = self._now + 1
        if key in again:
            again[key] = now
            again.move_to_end(key)
            return True
        if key in once:
            del once[key]
            again[key] = now
            return True
        left = self._left
        while len(once) + len(again) >= room:
            line = once
            if again:
                if once:
                    oldest, first = again[next(iter(again))], once[next(iter(once))]
                    if (now - 1 - oldest) / self._weight > now - 1 - first:
                        line = again
                else:
                    line = again
            elif not once:
                break
            left[line.popitem(last=False)[0]] = None
            if len(left) > self._ghosts * room:
                left.popitem(last=False)
        if key in left:
            del left[key]
            again[key] = now
        else:
            once[key] = now
        return False

    def end_period(self, fade: float) -> None:
        """Add this period's lead to what was won; earlier periods count ``fade`` times as much."""
        self.won = (self.won + self.lead) * fade
        self._squares = (self._squares + self.lead * self.lead) * fade
        self.lead = 0


__all__ = ["WeightShadow"]
