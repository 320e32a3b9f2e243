"""A cache of keys in three lines at certain weights (``three_lines``), and its recent lead over a baseline.

``adaptive`` asks four of them at every sampled use, so ``use`` is ``ThreeLines``'s steps written out in one function. A
test holds it to ``ThreeLines``.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.kv_policy.eviction import ContentKey
from kvcontrol.kv_policy.three_lines import OFTEN, Weights


class WeightShadow:
    """``ghosts`` keys for each that there is room for are remembered once they have left."""

    __slots__ = ("_again", "_ghosts", "_left", "_now", "_often", "_once", "_squares", "_weights", "lead", "won")

    def __init__(self, weights: Weights, *, ghosts: int) -> None:
        self._weights = weights
        self._ghosts = ghosts
        self._once: OrderedDict[ContentKey, int] = OrderedDict()
        self._again: OrderedDict[ContentKey, int] = OrderedDict()
        """With the time, negative where it is a third use."""
        self._often: OrderedDict[ContentKey, int] = OrderedDict()
        self._left: OrderedDict[ContentKey, int] = OrderedDict()
        """With the uses."""
        self._now = 0
        self.lead = 0
        """Found more than by the other's shadow in this period."""
        self.won = 0.0
        self._squares = 0.0

    @property
    def spread(self) -> float:
        """Return the root of the sum of the periods' squares, faded as ``won`` is."""
        return math.sqrt(self._squares)

    def find(self, prompt: Sequence[ContentKey]) -> int:
        """Return how many leading keys of a prompt are there. Nothing changes. O(keys)."""
        once, again, often = self._once, self._again, self._often
        for place, key in enumerate(prompt):
            if key not in often and key not in again and key not in once:
                return place
        return len(prompt)

    def use(self, key: ContentKey, capacity: int) -> bool:
        """Use a key in a cache of so much room, and return whether it was there. O(1) amortised."""
        once, again, often = self._once, self._again, self._often
        self._now = now = self._now + 1
        if key in often:
            often[key] = now
            often.move_to_end(key)
            return True
        if key in again:
            if again.pop(key) < 0:
                often[key] = now
            else:
                again[key] = -now
            return True
        if key in once:
            del once[key]
            again[key] = now
            return True
        self._evict_to(capacity)
        uses = self._left.pop(key, 0)
        if not uses:
            once[key] = now
        elif uses >= OFTEN - 1:
            often[key] = now
        else:
            again[key] = now if uses == 1 else -now
        return False

    def _evict_to(self, capacity: int) -> None:
        once, again, often, left = self._once, self._again, self._often, self._left
        now = self._now - 1
        while len(once) + len(again) + len(often) >= capacity:
            line, most = once, -1.0
            if once:
                most = now - once[next(iter(once))]
            if again:
                age = (now - abs(again[next(iter(again))])) / self._weights[1]
                if age > most:
                    line, most = again, age
            if often and (now - often[next(iter(often))]) / self._weights[2] > most:
                line = often
            gone, at = line.popitem(last=False)
            left[gone] = 1 if line is once else OFTEN if line is often else 3 if at < 0 else 2
            if len(left) > self._ghosts * capacity:
                left.popitem(last=False)

    def end_period(self, fade: float) -> None:
        """Add this period's lead to the total; earlier periods are multiplied by ``fade``."""
        self.won = (self.won + self.lead) * fade
        self._squares = (self._squares + self.lead * self.lead) * fade
        self.lead = 0
