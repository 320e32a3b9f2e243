"""How two sides differ on the same requests, with confidence intervals: a paired block bootstrap.

Requests near each other are not independent: a cache that lost a conversation misses all of its turns, a queue delays
all that stand in it. So segments of consecutive requests are drawn with replacement, not requests, the same of both
sides. A change is B against A as a share of A, its interval the middle 95 % of the draws. Zero inside: a tie.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from lab.simulate.outcome import Served

SEGMENTS: Final = 60
"""Parts of a run that are drawn; fewer where there are fewer requests."""
DRAWS: Final = 1000
_INTERVAL: Final = (2.5, 97.5)

Rows = np.ndarray[Any, np.dtype[np.float64]]
"""Prompt tokens, found tokens and TTFT of each request."""


class Verdict(StrEnum):
    """B beside A."""

    BETTER = "better"
    WORSE = "worse"
    TIE = "tie"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure of both sides; ``change``, ``low`` and ``high`` are shares of A's."""

    figure: str
    a: float
    b: float
    change: float
    low: float
    high: float
    more_is_better: bool

    @property
    def verdict(self) -> Verdict:
        if self.low <= 0 <= self.high:
            return Verdict.TIE
        return Verdict.BETTER if (self.low > 0) == self.more_is_better else Verdict.WORSE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    of: Callable[[Rows], float]
    more_is_better: bool


def _quantile(share: float) -> Callable[[Rows], float]:
    return lambda rows: float(np.quantile(rows[:, 2], share, method="inverted_cdf"))


FIGURES: Final = {
    "found_ratio": _Figure(of=lambda rows: float(rows[:, 1].sum() / rows[:, 0].sum()), more_is_better=True),
    "ttft_mean_s": _Figure(of=lambda rows: float(rows[:, 2].mean()), more_is_better=False),
    "ttft_p50_s": _Figure(of=_quantile(0.5), more_is_better=False),
    "ttft_p90_s": _Figure(of=_quantile(0.9), more_is_better=False),
    "ttft_p99_s": _Figure(of=_quantile(0.99), more_is_better=False),
}
"""What is compared, by name."""


def compare(pairs: Sequence[tuple[Sequence[Served], Sequence[Served]]], *, seed: int) -> list[Change]:
    """Return every figure of ``FIGURES`` over the requests that both sides of a run answered, all runs together.

    ``ValueError`` where they have none in common, or A has 0 of a figure. O(draws x requests).
    """
    segments: list[tuple[Rows, Rows]] = []
    for a, b in pairs:
        rows_a, rows_b = _in_common(a, b)
        parts = min(SEGMENTS, len(rows_a))
        segments += zip(np.array_split(rows_a, parts), np.array_split(rows_b, parts), strict=True)
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, len(segments), len(segments)) for _ in range(DRAWS)]
    all_a, all_b = (np.concatenate([each[side] for each in segments]) for side in (0, 1))
    changes: dict[str, list[float]] = {name: [] for name in FIGURES}
    for places in drawn:
        rows_a, rows_b = (np.concatenate([segments[place][side] for place in places]) for side in (0, 1))
        for name, figure in FIGURES.items():
            if of_a := figure.of(rows_a):
                changes[name].append(figure.of(rows_b) / of_a - 1)
    found = []
    for name, figure in FIGURES.items():
        a_value, b_value = figure.of(all_a), figure.of(all_b)
        if not a_value:
            raise ValueError(
                f"{name} is 0 with A, and a change is a share of that; give A settings that find something"
            )
        low, high = np.percentile(changes[name], _INTERVAL)
        found.append(
            Change(
                figure=name,
                a=a_value,
                b=b_value,
                change=b_value / a_value - 1,
                low=float(low),
                high=float(high),
                more_is_better=figure.more_is_better,
            )
        )
    return found


def _in_common(a: Sequence[Served], b: Sequence[Served]) -> tuple[Rows, Rows]:
    """Return what both sides answered, in the order of the workload, as rows of prompt, found and TTFT."""
    of_a, of_b = ({(each.number, each.copy): each for each in side} for side in (a, b))
    both = sorted(of_a.keys() & of_b.keys())
    if not both:
        raise ValueError("A and B have no answered request in common")
    return _rows(of_a, both), _rows(of_b, both)


def _rows(served: Mapping[tuple[int, int], Served], keys: Sequence[tuple[int, int]]) -> Rows:
    found = (served[key] for key in keys)
    rows = [(max(1, each.prompt_tokens), each.found_tokens, each.ttft_s) for each in found]
    return np.array(rows, dtype=np.float64)
