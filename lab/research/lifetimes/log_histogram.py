"""Counts of positive numbers in buckets of equal ratio, and what follows of a distribution over such buckets."""

import math
from collections.abc import Sequence
from typing import Final

PER_DOUBLING: Final = 8
BUCKETS: Final = 22 * PER_DOUBLING
"""Up to four million; what is larger counts as that."""
_RATIO: Final = 2 ** (1 / PER_DOUBLING)


def bucket_of(value: float) -> int:
    """Return a value's bucket; the first is for all up to 1."""
    return min(BUCKETS - 1, max(0, int(math.log2(value) * PER_DOUBLING))) if value > 1 else 0


def start_of(bucket: int) -> float:
    """Return the least value of a bucket but the first."""
    return 2 ** (bucket / PER_DOUBLING)


def bucket_at(weights: Sequence[float], share: float, *, above: float = 0.0) -> int | None:
    """Return the bucket below whose end ``share`` of a distribution stays, of what is over ``above``.

    A bucket is what can be told apart, a step of 9 %, and nothing finer is made up. None: nothing is over ``above``.
    """
    first = bucket_of(above) if above > 0 else 0
    parts = list(weights[first:])
    if above > 0:
        parts[0] *= max(0.0, 1 - math.log(max(1.0, above / start_of(first))) / math.log(_RATIO))
    wanted = share * math.fsum(parts)
    if wanted <= 0:
        return None
    for bucket, weight in enumerate(parts, first):
        if weight >= wanted:
            return bucket
        wanted -= weight
    return BUCKETS - 1


def middle_of(bucket: int) -> float:
    """Return what stands for a bucket's values."""
    return start_of(bucket) * math.sqrt(_RATIO)


def mass_between(weights: Sequence[float], low: float, high: float) -> float:
    """Return the weight of the buckets from that of ``low`` to that of ``high``."""
    return math.fsum(weights[bucket_of(low) : bucket_of(high) + 1])


class LogHistogram:
    """Counts that are halved when they have grown to ``memory``, so that what is long past fades. O(1) a value."""

    __slots__ = ("_memory", "counts", "total")

    def __init__(self, memory: float) -> None:
        self.counts = [0.0] * BUCKETS
        self.total = 0.0
        self._memory = memory

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bucket_of(value)] += 1
        self.total += 1
        if self.total > self._memory:
            self.counts = [count / 2 for count in self.counts]
            self.total /= 2
