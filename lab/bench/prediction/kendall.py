"""Kendall's rank correlation with ties (tau-b), by Knight's method (1966): O(n log n)."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import sqrt


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return tau-b of two rankings of the same things: 1 the same, -1 reversed, 0 also where one is all ties."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values and {len(second)}; there must be as many")
    pairs = sorted(zip(first, second, strict=True))
    total = _pairs_of(len(pairs))
    tied_first = _ties(value for value, _ in pairs)
    tied_second = _ties(second)
    tied_both = _ties(pairs)
    _, discordant = _sorted([value for _, value in pairs])
    apart = sqrt((total - tied_first) * (total - tied_second))
    if not apart:
        return 0.0
    return (total - tied_first - tied_second + tied_both - 2 * discordant) / apart


def _pairs_of(number: int) -> int:
    return number * (number - 1) // 2


def _ties(values: Iterable[Hashable]) -> int:
    return sum(_pairs_of(count) for count in Counter(values).values())


def _sorted(values: list[float]) -> tuple[list[float], int]:
    """Return values in order, and how many pairs were out of it."""
    if len(values) <= 1:
        return values, 0
    middle = len(values) // 2
    left, swaps_left = _sorted(values[:middle])
    right, swaps_right = _sorted(values[middle:])
    merged: list[float] = []
    swaps = swaps_left + swaps_right
    at_left = at_right = 0
    while at_left < len(left) and at_right < len(right):
        if left[at_left] <= right[at_right]:
            merged.append(left[at_left])
            at_left += 1
        else:
            swaps += len(left) - at_left
            merged.append(right[at_right])
            at_right += 1
    return [*merged, *left[at_left:], *right[at_right:]], swaps
