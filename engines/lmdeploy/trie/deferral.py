"""A moment in which those who watch the block trie are not told yet, because a request waits for its first token.

While blocks are loaded, 16 cores and a device share the host's memory, and what follows them block by block takes
several times what it takes otherwise: 20 ms for 100,000 tokens, just before the forward. Nobody needs it just then.
"""

import math
import time
from collections.abc import Callable

MOST_S = 0.3
"""Nothing is put off for longer than this, however often a moment is asked for."""


class PutOff:
    """Whether it is such a moment. One thread. A moment that was not ended can only be prolonged, also once it is over:
    what was put off in it waits still.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s, self._until_s = math.inf, -math.inf

    def begin(self, for_s: float) -> None:
        """Begin a moment, or prolong the one that was not ended."""
        now_s = self._clock()
        self._since_s = min(self._since_s, now_s)
        self._until_s = max(self._until_s, min(now_s + for_s, self._since_s + MOST_S))

    def end(self) -> None:
        """End it: nothing waits."""
        self._since_s, self._until_s = math.inf, -math.inf

    def __bool__(self) -> bool:
        """Whether it is now."""
        return self._clock() < self._until_s


class TellsLater:
    """Who watches the block trie and tells others of it: at once, or in order when the moment is over. One thread."""

    def __init__(self) -> None:
        self.put_off = PutOff()
        self._untold: list[Callable[[], None]] = []
        """What is to be told, in this order; none of it raises."""

    @property
    def has_untold(self) -> bool:
        """Whether anything waits to be told."""
        return bool(self._untold)

    def put_off_telling(self, for_s: float) -> None:
        """Let what comes be told a moment later."""
        if not self.has_untold:
            self.put_off.end()
        self.put_off.begin(for_s)

    def settle(self) -> None:
        """Tell all that waits, unless that is put off. Never raises."""
        if self.has_untold and not self.put_off:
            self.settle_now()

    def settle_now(self) -> None:
        """Tell all that waits, put off or not. Never raises."""
        self.put_off.end()
        untold, self._untold = self._untold, []
        for tell in untold:
            tell()


__all__ = ["MOST_S", "PutOff", "TellsLater"]
