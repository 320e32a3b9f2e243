"""Whether a run kept its scenario's thresholds, and which it broke."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from loadtests.scenario import Thresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run came to, over all users; a time is None where no request has one."""

    requests: float
    failed_ratio: float
    shed_ratio: float
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p95_ms: float | None
    e2e_p95_ms: float | None
    cached_ratio: float | None


def broken(thresholds: Thresholds, figures: Figures) -> Iterator[str]:
    """Yield a line for each threshold that doesn't hold. A figure that there isn't breaks its threshold; a run without
    a request breaks all.
    """
    if not figures.requests:
        yield "requests: there was none"
    for each in fields(thresholds):
        limit = getattr(thresholds, each.name)
        if limit is None:
            continue
        name, _, side = each.name.rpartition("_")
        seen = getattr(figures, name)
        if seen is None:
            yield f"{name}: not known; {side} {limit:g}"
        elif (seen > limit) if side == "max" else (seen < limit):
            yield f"{name} is {seen:.4g}; {side} {limit:g}"
