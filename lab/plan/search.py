"""The least number that is enough, where trying one takes long: doubling steps, then bisection.

It takes it that more is never worse, and looks whether that holds: the number above the least one is tried too, and
where that isn't enough the search goes on above it. So what is found is no lucky exception, and exceptions are said.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """``least`` is None where nothing up to the most is enough. ``exceptions`` were enough, and a larger one wasn't."""

    least: int | None
    tried: tuple[int, ...]
    exceptions: tuple[int, ...]


def least_enough(enough: Callable[[int], bool], *, first: int, most: int) -> Found:
    """Search 1 to ``most``, ``first`` being tried first: the nearer it is, the fewer tries. Each is tried once."""
    seen: dict[int, bool] = {}

    def tried(number: int) -> bool:
        if number not in seen:
            seen[number] = enough(number)
        return seen[number]

    def found(least: int | None) -> Found:
        bad = [number for number, good in seen.items() if not good]
        exceptions = [number for number, good in seen.items() if good and bad and number < max(bad)]
        return Found(least=least, tried=tuple(seen), exceptions=tuple(sorted(exceptions)))

    first = min(max(1, first), most)
    low, high = _down(tried, first) if tried(first) else _up(tried, first, most)
    while high is not None:
        while high - low > 1:
            middle = (low + high) // 2
            if tried(middle):
                high = middle
            else:
                low = middle
        if high == most or tried(high + 1):
            return found(high)
        low, high = _up(tried, high + 1, most)
    return found(None)


def _up(tried: Callable[[int], bool], low: int, most: int) -> tuple[int, int | None]:
    """From one that isn't enough: return the last that isn't and the first that is, None where there is none."""
    step = 1
    while low < most:
        above = min(most, low + step)
        if tried(above):
            return low, above
        low, step = above, 2 * step
    return low, None


def _down(tried: Callable[[int], bool], high: int) -> tuple[int, int]:
    """From one that is enough, likewise; 0 is never enough."""
    step = 1
    while high > 1:
        below = max(1, high - step)
        if not tried(below):
            return below, high
        high, step = below, 2 * step
    return 0, high
