"""One clock for all gateways of a store: the store's clock, as this process has read it."""

from collections.abc import Callable
from time import monotonic, time
from typing import Final

MOST_SKEW_S: Final = 5.0
"""A clock that differs by more is a problem."""


class SharedClock:
    """Seconds since 1970 by the store's clock, by this machine's clock before the first read of the store.

    Between two reads it advances with ``ticks``: setting this machine's clock revives no expired key.
    """

    def __init__(self, own: Callable[[], float] = time, ticks: Callable[[], float] = monotonic) -> None:
        self.own = own
        self._ticks = ticks
        self._ahead_s = own() - ticks()

    def __call__(self) -> float:
        return self._ahead_s + self._ticks()

    def seen(self, skew_s: float) -> None:
        """Note the lead of this machine's clock over the store's."""
        self._ahead_s = self.own() - skew_s - self._ticks()
