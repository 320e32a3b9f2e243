"""Deferral of the reports that watchers of the block trie make, while a request waits for its first token.

While blocks are loaded, 16 cores and a device share the host's memory, and reports for each block take several times
as long as usual: 20 ms for 100,000 tokens, just before the forward. No reader needs them at that moment.
"""

import math
import time
from collections.abc import Callable

MOST_S = 0.3
"""Longest deferral, however often it is prolonged."""


class Deferral:
    """Whether reports are deferred now. One thread.

    A deferral that has expired but was not ended can only be prolonged: its reports are still pending.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s, self._until_s = math.inf, -math.inf

    def begin(self, for_s: float) -> None:
        """Begin a deferral, or prolong the one that was not ended."""
        now_s = self._clock()
        self._since_s = min(self._since_s, now_s)
        self._until_s = max(self._until_s, min(now_s + for_s, self._since_s + MOST_S))

    def end(self) -> None:
        """End the deferral: no report is pending."""
        self._since_s, self._until_s = math.inf, -math.inf

    def __bool__(self) -> bool:
        """Return whether reports are deferred now."""
        return self._clock() < self._until_s


class DeferringWatcher:
    """A watcher of the block trie that reports changes at once, or in order when a deferral ends. One thread."""

    def __init__(self) -> None:
        self.deferral = Deferral()
        self._pending: list[Callable[[], None]] = []
        """Reports in order; none of them raises."""

    @property
    def has_pending(self) -> bool:
        """Whether a report is pending."""
        return bool(self._pending)

    def defer(self, for_s: float) -> None:
        """Defer reports for ``for_s`` seconds, at most ``MOST_S`` in all."""
        if not self.has_pending:
            self.deferral.end()
        self.deferral.begin(for_s)

    def settle(self) -> None:
        """Make all pending reports, unless they are deferred. Never raises."""
        if self.has_pending and not self.deferral:
            self.settle_now()

    def settle_now(self) -> None:
        """Make all pending reports, deferred or not. Never raises."""
        self.deferral.end()
        pending, self._pending = self._pending, []
        for report in pending:
            report()
