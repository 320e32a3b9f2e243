"""Two LRU lines, of what was used once and of what came again, and a weight between them.

The victim is the first of the line whose first is older, where the age of what came again counts ``1 / weight``. With a
weight of 1 that is LRU over both, exactly; with infinity what was used once always goes first. All in between is a
matter of how much longer a second use is worth waiting for, and may be changed at any moment at no cost.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")


class TwoLines(Generic[Key]):
    """Things in two lines, each the youngest last. Every call is O(1)."""

    __slots__ = ("_now", "again", "once")

    def __init__(self) -> None:
        self.once: OrderedDict[Key, int] = OrderedDict()
        """With the time of each; whoever takes out many may do so here."""
        self.again: OrderedDict[Key, int] = OrderedDict()
        self._now = 0

    def __len__(self) -> int:
        return len(self.once) + len(self.again)

    def __contains__(self, key: Key) -> bool:
        return key in self.again or key in self.once

    def put(self, key: Key, *, again: bool) -> None:
        """Put what stands nowhere at the young end of a line."""
        self._now += 1
        (self.again if again else self.once)[key] = self._now

    def use(self, key: Key) -> bool:
        """Put a thing at the young end of those that came again; False, and nothing changes, if it stands nowhere."""
        again = self.again
        if key in again:
            again.move_to_end(key)
        elif self.once.pop(key, None) is None:
            return False
        self._now += 1
        again[key] = self._now
        return True

    def drop(self, key: Key, *, again: bool) -> None:
        """Take a thing out of its line; ``KeyError`` if it isn't there."""
        del (self.again if again else self.once)[key]

    def first(self, weight: float) -> Key | None:
        """Return who goes next; None when nobody is there."""
        once, again = self.once, self.again
        for oldest in again:
            for first in once:
                now = self._now
                return oldest if (now - again[oldest]) / weight > now - once[first] else first
            return oldest
        return next(iter(once), None)

    def pop(self, weight: float) -> Key | None:
        """Take out who goes next; None when nobody is there."""
        key = self.first(weight)
        if key is not None and self.once.pop(key, None) is None:
            del self.again[key]
        return key


__all__ = ["TwoLines"]
