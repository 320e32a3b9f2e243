"""One clock for all gateways of a store: the store's own, as far as this process has seen it."""

from collections.abc import Callable
from time import monotonic, time
from typing import Final

MOST_SKEW_S: Final = 5.0
"""A clock that differs by more is a problem."""


class SharedClock:
    """Seconds since 1970 by the store's clock. Until that was seen, this machine's clock is taken for right.

    Between two looks it goes on by ``ticks``, so that nobody who sets this machine's clock makes an expired key good.
    """

    def __init__(self, own: Callable[[], float] = time, ticks: Callable[[], float] = monotonic) -> None:
        self.own = own
        self._ticks = ticks
        self._ahead_s = own() - ticks()

    def __call__(self) -> float:
        return self._ahead_s + self._ticks()

    def seen(self, skew_s: float) -> None:
        """Note by how much this machine's clock is ahead of the store's."""
        self._ahead_s = self.own() - skew_s - self._ticks()
