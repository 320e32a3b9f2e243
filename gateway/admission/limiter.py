"""The concurrency limit of each instance, adapted to its measured capacity.

An engine batches so many requests; more only lengthen its own line, where shares of tenants don't hold, and classes
and deadlines as its own schedule goes by them. So the limit starts a little above the batch size that the engine
reports, and then follows what happens. It grows by one with every answer that begins in time while the limit is in use
(doubling each round), shrinks by a tenth when the engine reports more requests waiting than it should hold, and by a
third when it shows overload: 429 or 503, no connection in time, or no first byte in time. At most one decrease a
second, so that one bad moment counts once. It doesn't shrink below one more than the answers that are under way there:
those it can take, as it does, and where there is no room nothing would begin that lets the limit grow again.

What an engine has beyond its batch waits there, and would go before a more important request that waits here. So a
quarter of a batch of the highest class may always be there without an answer, whatever else it has, and those of the
lowest leave so many places to the others: the engine's schedule puts them before what waits there. Who has risen by
waiting is of the class that it has risen to, here and at the engine: or the important ones, of which one more comes
with each that begins, would be before it at both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Final

from gateway.registry import Instance, InstanceState
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole

LEAST: Final = 1
_UNREPORTED: Final = 256
"""An engine that says nothing of its batch is not held back on a guess: to wait for nothing is the worse mistake."""
_SLACK: Final = 1.25
_WAITING_SHARE: Final = 0.25
_SHRINK_WAITING: Final = 0.9
_SHRINK_OVERLOAD: Final = 0.7
_PAUSE_S: Final = 1.0


FreePlaces = tuple[int, int, int]
"""How many more requests an instance may be given, by ``Claim``."""


@dataclass(slots=True)
class _Limit:
    value: float
    batch: int
    reported: bool
    decreased_s: float = float("-inf")
    bounds: tuple[int, int, int] | None = None  # what ``value`` comes to, once somebody asked

    def becomes(self, value: float) -> None:
        self.value, self.bounds = value, None


class ConcurrencyLimiter:
    """Owns the limits. ``most`` bounds them, and ``most_decoding`` besides those of decode instances (0: it doesn't);
    ``slow_s`` is when a first byte is late.
    """

    def __init__(self, *, most: int, slow_s: float, clock: Callable[[], float], most_decoding: int = 0) -> None:
        self._most = most
        self._most_decoding = most_decoding
        self._slow_s = slow_s
        self._clock = clock
        self._limits: dict[InstanceId, _Limit] = {}

    def limit(self, instance: Instance) -> int:
        """Return how many requests this instance may have now."""
        return self._bounds(instance)[0]

    def free_places(self, instance: Instance, in_flight: int, urgent: int = 0) -> FreePlaces:
        """Return how many more requests this instance may be given, for one of each ``Claim`` to be the last.
        ``urgent`` of those in flight are of the highest class and have no answer yet.
        """
        limit, low, more = self._bounds(instance)
        taken = in_flight + instance.foreign_requests
        if taken <= limit - more:
            free = limit - taken
            return free, free, low - taken
        free, most = max(0, limit - taken), self._most_of(instance) - in_flight
        return max(free, min(more - urgent, most)), free, max(0, low - taken)

    def _bounds(self, instance: Instance) -> tuple[int, int, int]:
        """The limit, that for requests of the lowest class, and how many of the highest may wait for an answer there
        whatever else it has.
        """
        known = self._limits.get(instance.id) or self._of(instance)
        if known.bounds is None:
            limit = int(known.value)
            # Below its batch nobody waits there for a place: it is in another trouble, and that is everybody's.
            more = ceil(known.batch * _WAITING_SHARE) if known.reported and limit >= known.batch else 0
            known.bounds = limit, max(min(limit, known.batch), limit - more), more
        if self._most_decoding and instance.role is EngineRole.DECODE:
            limit, low, more = known.bounds
            return min(limit, self._most_decoding), min(low, self._most_decoding), more
        return known.bounds

    def _most_of(self, instance: Instance) -> int:
        """What no request may exceed, however important."""
        if self._most_decoding and instance.role is EngineRole.DECODE:
            return min(self._most, self._most_decoding)
        return self._most

    def answered(self, instance: Instance, *, after_s: float, in_flight: int, answering: int = 0) -> None:
        """Note a first byte that came ``after_s`` seconds after the request was sent; ``answering`` of those in flight
        had theirs before.
        """
        if after_s > self._slow_s:
            self.overloaded(instance, answering=answering)
            return
        limit = self._of(instance)
        if in_flight + 1 >= int(limit.value) and not _line_is_long(instance):
            limit.becomes(min(limit.value + 1, self._most))

    def overloaded(self, instance: Instance, *, answering: int = 0) -> None:
        """Note that an instance could not take a request, or not in time, while so many answers were under way."""
        self._decrease(self._of(instance), _SHRINK_OVERLOAD, LEAST + answering)

    def watch(self, instances: tuple[Instance, ...]) -> None:
        """Look at what instances report; forget those that are away: they come back with another engine."""
        for each in instances:
            if each.state is not InstanceState.HEALTHY:
                self._limits.pop(each.id, None)
            elif _line_is_long(each):
                limit = self._of(each)
                self._decrease(limit, _SHRINK_WAITING, limit.batch)
        known = {each.id for each in instances}
        for gone in [each for each in self._limits if each not in known]:
            del self._limits[gone]

    def _decrease(self, limit: _Limit, factor: float, least: int) -> None:
        now_s = self._clock()
        if now_s - limit.decreased_s >= _PAUSE_S:
            limit.decreased_s = now_s
            limit.becomes(max(min(limit.value, least), limit.value * factor))

    def _of(self, instance: Instance) -> _Limit:
        limit = self._limits.get(instance.id)
        if limit is None:
            reported = instance.stats is not None
            batch = _UNREPORTED if instance.stats is None else max(LEAST, instance.stats.load.max_batch_size)
            limit = _Limit(value=float(min(self._most, ceil(batch * _SLACK))), batch=batch, reported=reported)
            self._limits[instance.id] = limit
        return limit


def _line_is_long(instance: Instance) -> bool:
    """Whether the engine itself holds more waiting requests than keep it fed."""
    if instance.stats is None:
        return False
    load = instance.stats.load
    return load.waiting > max(1, load.max_batch_size * _WAITING_SHARE)
