"""How long answers paused between two tokens, as a histogram: many equal gaps are one entry."""

import math
from typing import Final

_LEAST_S: Final = 1e-4
_STEPS: Final = 20
"""Buckets a decade: the bounds of one are 12 % apart."""


class GapHistogram:
    """Counts by logarithmic buckets; O(1) a call."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0

    def add(self, seconds: float, count: int) -> None:
        """Count so many gaps of one length."""
        if count <= 0:
            return
        place = round(math.log10(max(seconds, _LEAST_S) / _LEAST_S) * _STEPS)
        self.counts[place] = self.counts.get(place, 0) + count
        self.total += count

    def merge(self, other: "GapHistogram") -> None:
        """Count what another one has counted."""
        for place, count in other.counts.items():
            self.counts[place] = self.counts.get(place, 0) + count
        self.total += other.total

    def quantile_s(self, share: float) -> float:
        """Return the length that ``share`` of the gaps don't exceed, within 6 %; 0 where there are none."""
        left = share * self.total
        for place in sorted(self.counts):
            left -= self.counts[place]
            if left <= 0:
                return float(_LEAST_S * 10 ** (place / _STEPS))
        return 0.0
