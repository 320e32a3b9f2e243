"""Which instance answers so much worse than its peers that it should be left alone for a while.

Errors that everybody makes are the requests' fault, or the model's; only a difference to the others speaks against an
instance. So an outlier is judged by its share of failures against that of all others together.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvcontrol.core.ids import InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierRules:
    """At least ``requests`` lately, at least ``share`` of them failed, and ``difference`` more than elsewhere. Counts
    halve every ``half_life_s``.
    """

    requests: float = 6.0
    share: float = 0.4
    difference: float = 0.3
    half_life_s: float = 10.0


class _Count:
    __slots__ = ("at_s", "bad", "good")

    def __init__(self) -> None:
        self.good = 0.0
        self.bad = 0.0
        self.at_s = 0.0


class OutlierDetector:
    """Counts good and failed answers by instance; counting is O(1), judging O(instances)."""

    def __init__(self, rules: OutlierRules) -> None:
        self._rules = rules
        self._counts: dict[InstanceId, _Count] = {}

    def answered(self, instance: InstanceId, *, good: bool, now_s: float) -> None:
        count = self._decayed(instance, now_s)
        if good:
            count.good += 1
        else:
            count.bad += 1

    def forget(self, instance: InstanceId) -> None:
        """Start anew with an instance: it was ejected, came back, or is gone."""
        self._counts.pop(instance, None)

    def verdict(self, instance: InstanceId, now_s: float) -> str | None:
        """Return why an instance is an outlier, None when it isn't."""
        own = self._decayed(instance, now_s)
        total = own.good + own.bad
        if total < self._rules.requests or own.bad < self._rules.share * total:
            return None
        share = own.bad / total
        good = bad = 0.0
        for each in tuple(self._counts):
            if each != instance:
                count = self._decayed(each, now_s)
                good += count.good
                bad += count.bad
        elsewhere = bad / (good + bad) if good + bad >= 1 else 0.0
        if good < 1 or share - elsewhere < self._rules.difference:
            return None
        return f"{share:.0%} of its answers failed lately, {elsewhere:.0%} of the others'"

    def shares(self, now_s: float) -> Mapping[InstanceId, float]:
        """Return each instance's share of failed answers lately."""
        counts = {each: self._decayed(each, now_s) for each in tuple(self._counts)}
        return {each: count.bad / (count.good + count.bad) for each, count in counts.items() if count.good + count.bad}

    def _decayed(self, instance: InstanceId, now_s: float) -> _Count:
        count = self._counts.get(instance)
        if count is None:
            count = self._counts[instance] = _Count()
            count.at_s = now_s
            return count
        if now_s > count.at_s:
            factor = 0.5 ** ((now_s - count.at_s) / self._rules.half_life_s)
            count.good *= factor
            count.bad *= factor
            count.at_s = now_s
        return count
