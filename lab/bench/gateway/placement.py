"""Where requests went: how evenly they were spread, and whether what belongs together stayed together."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Placed(NamedTuple):
    """One request: what it belongs to ("" for nothing that comes again), and the backend that answered it."""

    key: str
    backend: str


def hotspot(placed: Sequence[Placed], backends: int) -> float:
    """Return the load of the busiest backend over the mean: 1 is even, ``backends`` is all on one."""
    most = max(Counter(each.backend for each in placed).values(), default=0)
    return most * backends / len(placed) if placed else 0.0


def affinity(placed: Sequence[Placed]) -> float | None:
    """Return the share of requests that went where the last one of their key went; None when no key came again. By
    chance it is one over the number of backends.
    """
    last: dict[str, str] = {}
    again = kept = 0
    for key, backend in placed:
        if key:
            if key in last:
                again += 1
                kept += backend == last[key]
            last[key] = backend
    return kept / again if again else None
