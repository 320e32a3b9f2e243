"""Whether a shadow policy is ahead of the policy in charge by more than its noise.

Every period the counters of all instances are read and what each candidate found in it is summed over the fleet. The
candidates see the same sampled look-ups, so a lead is a paired difference: blocks found more than the policy in charge
found, as a share of look-ups. Hits come and go in whole prompts and habits last for minutes, so its noise is the spread
of periods, not of blocks (the standard error of a ratio of sums, over periods).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from typing import Final, NamedTuple

from kvcontrol.core.ids import InstanceId

LEAST_PERIODS: Final = 10
"""Fewer prove nothing."""
MOST_PERIODS: Final = 60
"""Older ones are forgotten: traffic changes."""
SPREADS: Final = 3.0
"""A lead of fewer standard errors is a tie."""
LEAST_LEAD: Final = 0.01
"""A lead of a smaller share of the look-ups is not worth a swap, and a tie."""


class Counted(NamedTuple):
    """A candidate's counters on one instance since it is followed there, in blocks."""

    lookups: int
    hits: int


class Verdict(StrEnum):
    """A candidate beside the policy in charge."""

    AHEAD = "ahead"
    BEHIND = "behind"
    TIE = "tie"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """The hits of a candidate beyond another policy's, as a share of look-ups; ``noise`` is its standard error."""

    policy: str
    lead: float
    noise: float
    periods: int

    @property
    def verdict(self) -> Verdict:
        if self.periods < LEAST_PERIODS or abs(self.lead) < max(LEAST_LEAD, SPREADS * self.noise):
            return Verdict.TIE
        return Verdict.AHEAD if self.lead > 0 else Verdict.BEHIND


class _Period(NamedTuple):
    at_s: float
    found: Mapping[str, Counted]
    """Over the fleet, by candidate."""


class ShadowEvidence:
    """The last periods of a fleet. One thread."""

    def __init__(self) -> None:
        self._periods: deque[_Period] = deque(maxlen=MOST_PERIODS)
        self._before: Mapping[InstanceId, Mapping[str, Counted]] = {}

    def observe(self, now_s: float, counted: Mapping[InstanceId, Mapping[str, Counted]]) -> None:
        """End a period with the counters of all instances that could be read.

        An instance counts if it was read before with the same candidates and has not restarted.
        """
        sums: dict[str, list[int]] = {}
        for instance, now in counted.items():
            before = self._before.get(instance)
            if before is None or before.keys() != now.keys():
                continue
            grown = {
                name: Counted(now[name].lookups - before[name].lookups, now[name].hits - before[name].hits)
                for name in now
            }
            if any(each.lookups < 0 or each.hits < 0 for each in grown.values()):
                continue
            for name, each in grown.items():
                total = sums.setdefault(name, [0, 0])
                total[0] += each.lookups
                total[1] += each.hits
        self._before = dict(counted)
        found = {name: Counted(*total) for name, total in sums.items() if total[0]}
        if found:
            self._periods.append(_Period(now_s, found))

    def leads(self, over: str, *, since_s: float = -inf) -> Sequence[Lead]:
        """Return every other candidate's lead over one, in the periods that ended after ``since_s``; best first."""
        periods = [each.found for each in self._periods if each.at_s > since_s and over in each.found]
        names = dict.fromkeys(name for each in periods for name in each if name != over)
        found = [_lead(name, over, [each for each in periods if name in each]) for name in names]
        return sorted(found, key=lambda each: -each.lead)


def _lead(name: str, over: str, periods: Sequence[Mapping[str, Counted]]) -> Lead:
    more = [each[name].hits - each[over].hits for each in periods]
    lookups = [each[over].lookups for each in periods]
    total, count = sum(lookups), len(periods)
    lead = sum(more) / total
    noise = inf
    if count > 1:
        spread = sum((found - lead * requested) ** 2 for found, requested in zip(more, lookups, strict=True))
        noise = sqrt(spread * count / (count - 1)) / total
    return Lead(policy=name, lead=lead, noise=noise, periods=count)
