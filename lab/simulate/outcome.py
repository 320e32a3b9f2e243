"""What a fleet did with a workload."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from engines.sim.gaps import GapHistogram
from kvcontrol.core.blocks import CacheTier

_MOST_SHOWN: Final = 16
"""So many instances have their counts in a table one by one."""


class Served(NamedTuple):
    """One answered request: which of the workload, its TTFT and its whole time from its arrival on, and its tokens."""

    number: int
    copy: int
    ttft_s: float
    prompt_tokens: int
    found_tokens: int
    at_s: float = 0.0
    answer_s: float = 0.0
    output_tokens: int = 1

    @property
    def tpot_s(self) -> float | None:
        """Time per output token behind the first; None where there is none."""
        return (self.answer_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(slots=True)
class Tally:
    """Counted as it happens."""

    served: list[Served] = field(default_factory=list)

    ttft_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    by_tier: dict[CacheTier, int] = field(default_factory=dict)
    refused: int = 0
    shed: int = 0
    decision_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOutcome:
    """``ttft_s`` counts from a request's arrival at the gateway, waiting there included, sorted. ``ceiling_tokens`` are
    those that one cache with room for everything would have found. ``hotspot`` is the busiest instance's busy time over
    the mean; ``decision_us`` processor time, the rest virtual. One that isn't ``complete`` was stopped before its end.
    """

    policy: str
    instances: int
    requests: int
    shed: int
    refused: int
    ttft_s: Sequence[float]
    answer_s: Sequence[float]
    prompt_tokens: int
    found_by_tier: dict[CacheTier, int]
    ceiling_tokens: int
    hotspot: float
    busy: float
    lasts_s: float
    preemptions: int
    gaps: GapHistogram
    decision_us: float
    computed_tokens: int
    requests_by_instance: Sequence[int] = ()
    complete: bool = True
    served: Sequence[Served] = ()

    @property
    def found_tokens(self) -> int:
        """Prompt tokens that were cached where their requests went."""
        return sum(self.found_by_tier.values())

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found."""
        return self.found_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def of_ceiling(self) -> float:
        """Tokens found, as a share of the most that could be."""
        return self.found_tokens / self.ceiling_tokens if self.ceiling_tokens else 0.0

    @property
    def ttft_mean_s(self) -> float | None:
        """Mean time to the first token; None where none had one."""
        return sum(self.ttft_s) / len(self.ttft_s) if self.ttft_s else None

    @property
    def tpot_mean_ms(self) -> float | None:
        """Mean over the answers of their time per output token; None where none has two."""
        times = [tpot_s for each in self.served if (tpot_s := each.tpot_s) is not None]
        return 1e3 * sum(times) / len(times) if times else None

    @property
    def requests_per_s(self) -> float | None:
        """Answers a second until the last request was sent, as ``kvgate bench served`` counts them: one that ends later
        counts by the share of its time before. None where all came at once.
        """
        busy_s = max((each.at_s for each in self.served), default=0.0)
        if not busy_s:
            return None
        return sum(min(1.0, (busy_s - each.at_s) / each.answer_s) for each in self.served if each.answer_s) / busy_s

    @property
    def placed(self) -> str:
        """How many requests each instance got; of many instances the least, the median and the most."""
        counts = self.requests_by_instance
        if len(counts) <= _MOST_SHOWN:
            return " ".join(map(str, counts))
        ordered = sorted(counts)
        return f"{ordered[0]} to {ordered[-1]}, median {ordered[len(ordered) // 2]}"

    @property
    def shed_rate(self) -> float:
        """Share of requests that the gateway shed: a full queue, or too long a wait there."""
        return self.shed / self.requests if self.requests else 0.0

    @property
    def refused_rate(self) -> float:
        """Share of requests that no engine could take."""
        return self.refused / self.requests if self.requests else 0.0

    @property
    def answerable(self) -> int:
        """Requests that an engine could take at all."""
        return self.requests - self.refused

    @property
    def answered_rate(self) -> float:
        """Share of the answerable requests that got an answer; 0 where there are none, for nobody was served."""
        return len(self.answer_s) / self.answerable if self.answerable else 0.0

    def ttft_of_answerable(self, share: float) -> float:
        """Return the same of all answerable requests; those that were shed had to wait for ever."""
        place = rank(self.answerable, share)
        return inf if place > len(self.ttft_s) else self.ttft_s[place - 1]

    def ttft(self, share: float) -> float | None:
        """Return the time to the first token that a share of the requests doesn't exceed; None where none had one."""
        return quantile(self.ttft_s, share)

    def itl_ms(self, share: float) -> float | None:
        """Return the pause between two tokens that a share of them doesn't exceed; None where there was none."""
        return self.gaps.quantile_s(share) * 1e3 if self.gaps.total else None


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return a quantile of sorted values by the nearest rank; None of none."""
    if not ordered:
        return None
    return ordered[min(len(ordered), rank(len(ordered), share)) - 1]


def rank(count: int, share: float) -> int:
    """Return how many of ``count`` values a quantile is not to be exceeded by, at least 1."""
    return max(1, -int(-share * count // 1))
