"""Three weighted LRU lines: blocks used once, two or three times, and more often.

The victim is the first of the line whose first is oldest, where ages count ``1 / weight`` of the line; of two as old,
the one used less often. With weights of 1 that is LRU over all three, exactly; with ``ENDLESS`` ones what was used once
always goes first, and LRU among the others. All in between is a matter of how much longer further uses are worth
waiting for, and may be changed at any moment at no cost. A line that weighs something finite lets what isn't used any
more go: nothing has to expire.
"""

from collections import OrderedDict
from typing import Final, Generic, NamedTuple, TypeVar

Key = TypeVar("Key")

ENDLESS: Final = 2.0**40
"""A weight that no age makes up for."""
OFTEN: Final = 4
"""Uses that are counted: further ones change nothing."""
LINE_OF: Final = (0, 0, 1, 1, 2)
"""The line of each number of uses, at most ``OFTEN``."""


class Weights(NamedTuple):
    """How many times as slowly each line's things age, against those used once."""

    once: float = 1.0
    again: float = 1.0
    often: float = 1.0


LRU: Final = Weights()


class ThreeLines(Generic[Key]):
    """Things in three lines, each the youngest last. Every call is O(1)."""

    __slots__ = ("_now", "lines")

    def __init__(self) -> None:
        self.lines: tuple[OrderedDict[Key, int], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        """With the time of each; whoever takes out many may do so here."""
        self._now = 0

    def __len__(self) -> int:
        return sum(map(len, self.lines))

    def __contains__(self, key: Key) -> bool:
        return any(key in line for line in self.lines)

    def put(self, key: Key, uses: int) -> None:
        """Append a new block to the line of its number of uses."""
        self._now += 1
        self.lines[LINE_OF[uses]][key] = self._now

    def drop(self, key: Key, uses: int) -> None:
        """Take out a thing that was put in with so many uses; ``KeyError`` if it isn't there."""
        del self.lines[LINE_OF[uses]][key]

    def first(self, weights: Weights) -> Key | None:
        """Return the next victim; None if the lines are empty."""
        # Written out, as this is asked for each victim.
        once, again, often = self.lines
        now = self._now
        first: Key | None = None
        most = -1.0
        for key in once:
            first, most = key, now - once[key]
            break
        for key in again:
            age = (now - again[key]) / weights[1]
            if age > most:
                first, most = key, age
            break
        for key in often:
            if (now - often[key]) / weights[2] > most:
                first = key
            break
        return first
