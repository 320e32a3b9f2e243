"""All instances' circuit breakers, fed with the results of requests, and the outliers among the instances."""

import logging
from collections.abc import Callable, Iterable, Sequence

from gateway.registry.breaker import Breaker, BreakerRules, BreakerState
from gateway.registry.instance import Instance
from gateway.registry.outliers import OutlierDetector, OutlierRules
from kvcontrol.core.ids import InstanceId

_log = logging.getLogger(__name__)

_MOST_LEFT_ALONE = 0.5
"""Requests are kept from at most this share of the instances that could serve them: when everybody fails, leaving
everybody alone helps nobody.
"""


class Breakers:
    """Results for an instance that has been removed meanwhile are ignored. Where all breakers are closed, choosing
    instances costs nothing.
    """

    def __init__(self, rules: BreakerRules, outliers: OutlierRules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._outliers = OutlierDetector(outliers)
        self._clock = clock
        self._breakers: dict[InstanceId, Breaker] = {}
        self._troubled: set[InstanceId] = set()
        """Instances whose breakers are not closed."""
        self._seen_s: dict[InstanceId, float] = {}
        """When an instance last began an answer, or was last waited for in vain."""

    def enter(self, instance: InstanceId) -> None:
        self._breakers[instance] = Breaker(self._rules)

    def leave(self, instance: InstanceId) -> None:
        self._troubled.discard(instance)
        del self._breakers[instance]
        self._seen_s.pop(instance, None)
        self._outliers.forget(instance)

    @property
    def troubled(self) -> bool:
        """Whether any is not closed."""
        return bool(self._troubled)

    def state(self, instance: InstanceId) -> BreakerState:
        """Raises ``KeyError``."""
        return self._breakers[instance].state(self._clock())

    def reason(self, instance: InstanceId) -> str:
        """Return why it is not closed; empty when it is. Raises ``KeyError``."""
        return self._breakers[instance].reason

    def open_to_requests(self, candidates: Sequence[Instance]) -> tuple[Instance, ...]:
        """Return those whose breakers let requests through, or more where that would leave too few; but never one whose
        trial is under way: what comes of it will be known shortly.
        """
        if not self._troubled:
            return tuple(candidates)
        now_s = self._clock()
        closed = {each.id for each in candidates if self._breakers[each.id].allows(now_s)}
        trials = {each.id for each in candidates if self._breakers[each.id].on_trial(now_s)}
        most = int(len(candidates) * _MOST_LEFT_ALONE)
        if len(candidates) - len(closed) <= most or (trials and not closed):
            return tuple(each for each in candidates if each.id in closed)
        rest = sorted(each.id for each in candidates if each.id not in closed and each.id not in trials)
        alone = trials | set(rest[: max(0, most - len(trials))])
        return tuple(each for each in candidates if each.id not in alone)

    def on_trial(self, candidates: Iterable[Instance]) -> bool:
        """Whether none of these may be asked now, and the trial of one is under way."""
        if not self._troubled:
            return False
        now_s = self._clock()
        breakers = [self._breakers[each.id] for each in candidates]
        return any(each.on_trial(now_s) for each in breakers) and not any(each.allows(now_s) for each in breakers)

    def left_alone_s(self, candidates: Iterable[Instance]) -> float:
        """Return for how long requests are kept from all of these: 0 when one is free of that."""
        now_s = self._clock()
        return min((self._breakers[each.id].left_s(now_s) for each in candidates), default=0.0)

    def on_probation(self, instance: InstanceId) -> bool:
        """Whether it gets one request at a time now; one that isn't known does not."""
        return instance in self._troubled and self.state(instance) is BreakerState.HALF_OPEN

    def returned(self, instance: InstanceId) -> None:
        """Note that it is back after its health checks had failed."""
        self._breakers[instance].returned()
        self._note_trouble(instance)
        self._outliers.forget(instance)

    def seen_s(self, instance: InstanceId) -> float:
        """Return when an instance last began an answer, or was last waited for in vain; minus infinity for never."""
        return self._seen_s.get(instance, float("-inf"))

    def saw(self, instance: InstanceId) -> None:
        """Note that a request waited for an instance in vain."""
        self._seen_s[instance] = self._clock()

    def picked(self, instance: InstanceId) -> None:
        """Note that a request goes to an instance now: half open, it gets no other until that one has an answer."""
        if instance in self._troubled:
            self._breakers[instance].picked(self._clock())

    def ended(self, instance: InstanceId) -> None:
        """Note that a request that was given to an instance has ended, whatever came of it."""
        if instance in self._troubled:
            self._breakers[instance].trial_over()

    def answered(self, instance: InstanceId) -> None:
        """Note that an instance has begun to answer a request well (a refusal of a bad request is that, too)."""
        breaker = self._breakers.get(instance)
        if breaker is None:
            return
        now_s = self._seen_s[instance] = self._clock()
        self._outliers.answered(instance, good=True, now_s=now_s)
        if self.on_probation(instance):
            _log.info("circuit breaker of instance %s closed: it answers again", instance)
        breaker.succeeded()
        self._troubled.discard(instance)

    def answered_badly(self, instance: InstanceId, reason: str) -> None:
        """Note an error that may be the request's own fault (a 500): it counts only against better peers."""
        if instance in self._breakers:
            now_s = self._seen_s[instance] = self._clock()
            self._count_bad_answer(instance, now_s, reason)

    def failed(self, instance: InstanceId, reason: str) -> None:
        """Note that an instance failed a request: no answer, a cut one, a 502 to 504."""
        breaker = self._breakers.get(instance)
        if breaker is None:
            return
        now_s = self._clock()
        before = breaker.state(now_s)
        breaker.failed(now_s, reason)
        self._note_trouble(instance)
        if breaker.state(now_s) is not before:
            _log.warning("circuit breaker of instance %s opened: %s", instance, reason)
        self._count_bad_answer(instance, self._clock(), reason)

    def _count_bad_answer(self, instance: InstanceId, now_s: float, reason: str) -> None:
        self._outliers.answered(instance, good=False, now_s=now_s)
        breaker = self._breakers[instance]
        if breaker.state(now_s) is BreakerState.OPEN:
            return
        verdict = self._outliers.verdict(instance, now_s)
        if verdict is not None:
            breaker.trip(now_s, f"{verdict} (the last one: {reason})")
            self._note_trouble(instance)
            self._outliers.forget(instance)
            _log.warning("circuit breaker of instance %s opened: %s", instance, breaker.reason)

    def _note_trouble(self, instance: InstanceId) -> None:
        if not self._breakers[instance].closed:
            self._troubled.add(instance)
