"""What a fleet has to keep, and whether it did.

    ttft_p99=2s,itl_p99=50ms        limits of percentiles: of first tokens from arrival, of pauses between tokens
    ttft=2s                         of the percentile that --attainment is

A request that was shed waited for ever, so it counts in every percentile of first tokens; and the share that
gets an answer at all is to be the attainment too. Requests that no engine could take are in none of this.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

from lab.simulate.outcome import FleetOutcome, Tally, rank

ANSWERED: Final = "answered"
_FIGURES: Final = ("ttft", "itl")
_GOAL: Final = re.compile(
    r"(?P<figure>[a-z]+)(?:_p(?P<percent>\d+(?:\.\d+)?))?\s*=\s*(?P<amount>\d+(?:\.\d+)?)(?P<unit>ms|s)"
)
_HUNDRED: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """``share`` of the figure's values are not to exceed ``limit_s``."""

    figure: str
    share: float
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.figure}_p{self.share * _HUNDRED:g}"

    def seen_s(self, outcome: FleetOutcome) -> float:
        """Return what the figure came to."""
        if self.figure == "itl":
            return outcome.gaps.quantile_s(self.share)
        return outcome.ttft_of_answerable(self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A goal that was missed: by a ``factor`` above 1 of what is allowed; in words for people."""

    goal: str
    factor: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """All goals, and the share of the requests that is to be answered."""

    goals: tuple[Goal, ...]
    attainment: float

    @classmethod
    def parse(cls, text: str, attainment: float) -> "Slo":
        """Read ``ttft_p99=2s,itl_p99=50ms``; raises ``ValueError``."""
        if not 0 < attainment <= 1:
            raise ValueError(f"--attainment is {attainment:g}; it is a share above 0 and at most 1, like 0.99")
        goals: dict[str, Goal] = {}
        for part in filter(None, (each.strip() for each in text.split(","))):
            found = _GOAL.fullmatch(part)
            if found is None or found["figure"] not in _FIGURES:
                raise ValueError(
                    f"--slo: {part!r} is no goal; there are ttft and itl, with a percentile or without, in ms or s: "
                    "ttft_p99=2s,itl_p99=50ms"
                )
            share = attainment if found["percent"] is None else float(found["percent"]) / _HUNDRED
            limit_s = float(found["amount"]) * (1e-3 if found["unit"] == "ms" else 1.0)
            if not 0 < share <= 1 or not limit_s > 0:
                raise ValueError(f"--slo: {part!r}: a percentile is above 0 and at most 100, a limit above 0")
            goal = Goal(figure=found["figure"], share=share, limit_s=limit_s)
            if goal.name in goals:
                raise ValueError(f"--slo: {goal.name} is there twice")
            goals[goal.name] = goal
        if not goals:
            raise ValueError("--slo names no goal; say one like ttft_p99=2s")
        return cls(goals=tuple(goals.values()), attainment=attainment)

    def __str__(self) -> str:
        limits = [f"{each.name}={_seconds(each.limit_s)}" for each in self.goals]
        return ",".join([*limits, f"{ANSWERED}={self.attainment:.4g}"])

    def shortfalls(self, outcome: FleetOutcome) -> tuple[Shortfall, ...]:
        """Return the goals that were missed, by how much, the worst first."""
        missed = []
        for each in self.goals:
            seen_s = each.seen_s(outcome)
            if seen_s > each.limit_s:
                said = "never" if seen_s == inf else _seconds(seen_s)
                words = f"{each.name} is {said}, {_seconds(each.limit_s)} is allowed"
                missed.append(Shortfall(goal=each.name, factor=seen_s / each.limit_s, words=words))
        answered = outcome.answered_rate
        if answered < self.attainment:
            words = f"{answered:.2%} of the requests are answered, {self.attainment:.2%} are to be"
            factor = self.attainment / answered if answered else inf
            missed.append(Shortfall(goal=ANSWERED, factor=factor, words=words))
        return tuple(sorted(missed, key=lambda each: -each.factor))

    def hopeless(self, requests: int) -> Callable[[Tally], bool]:
        """Return what says, while so many requests are served, that a goal is missed for certain already."""
        limits = [(each.limit_s, requests - rank(requests, each.share)) for each in self.goals if each.figure == "ttft"]
        most_shed = requests - rank(requests, self.attainment)
        late = [0] * len(limits)
        looked = 0

        def asked(tally: Tally) -> bool:
            nonlocal looked
            new, looked = tally.ttft_s[looked:], len(tally.ttft_s)
            for place, (limit_s, allowed) in enumerate(limits):
                late[place] += sum(each > limit_s for each in new)
                if late[place] + tally.shed > allowed:
                    return True
            return tally.shed > most_shed

        return asked


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}ms" if seconds < 1 else f"{seconds:.4g}s"
