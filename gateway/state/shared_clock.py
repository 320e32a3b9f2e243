"""One clock for all gateways of a store: the store's own, as far as this process has seen it."""

from collections.abc import Callable
from time import time
from typing import Final

MOST_SKEW_S: Final = 5.0
"""A clock that differs by more is a problem."""


class SharedClock:
    """Seconds since 1970 by the store's clock. Until that was seen, this machine's clock is taken for right."""

    def __init__(self, own: Callable[[], float] = time) -> None:
        self._own = own
        self.skew_s = 0.0

    def __call__(self) -> float:
        return self._own() - self.skew_s

    def seen(self, skew_s: float) -> None:
        """Note by how much this machine's clock is ahead of the store's."""
        self.skew_s = skew_s


__all__ = ["MOST_SKEW_S", "SharedClock"]
