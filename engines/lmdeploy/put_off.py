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


__all__ = ["MOST_S", "PutOff"]
