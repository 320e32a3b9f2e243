"""How many requests each instance is given at once, adapted to what it can take.

An engine batches so many requests; more only lengthen its own line, where neither priority nor fairness nor a
deadline holds. So the limit starts a little above the batch size that the engine reports, and then follows what
happens. It grows by one with every answer that begins in time while the limit is in use (doubling each round), shrinks
by a tenth when the engine reports more requests waiting than it should hold, and by a third when it shows overload: 429
or 503, no connection in time, or no first byte in time. At most one decrease a second, so that one bad moment counts
once.
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


@dataclass(slots=True)
class _Limit:
    value: float
    batch: int
    decreased_s: float = float("-inf")


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
        limit = int(self._of(instance).value)
        if self._most_decoding and instance.role is EngineRole.DECODE:
            return min(limit, self._most_decoding)
        return limit

    def room(self, instance: Instance, in_flight: int) -> int:
        """Return how many more requests this instance may be given."""
        return max(0, self.limit(instance) - in_flight - instance.foreign_requests)

    def answered(self, instance: Instance, *, after_s: float, in_flight: int) -> None:
        """Note a first byte that came ``after_s`` seconds after the request was sent."""
        if after_s > self._slow_s:
            self.overloaded(instance)
            return
        limit = self._of(instance)
        if in_flight + 1 >= int(limit.value) and not _line_is_long(instance):
            limit.value = min(limit.value + 1, self._most)

    def overloaded(self, instance: Instance) -> None:
        """Note that an instance could not take a request, or not in time."""
        self._decrease(self._of(instance), _SHRINK_OVERLOAD, LEAST)

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
            limit.value = max(min(limit.value, least), limit.value * factor)

    def _of(self, instance: Instance) -> _Limit:
        limit = self._limits.get(instance.id)
        if limit is None:
            batch = _UNREPORTED if instance.stats is None else max(LEAST, instance.stats.load.max_batch_size)
            limit = _Limit(value=float(min(self._most, ceil(batch * _SLACK))), batch=batch)
            self._limits[instance.id] = limit
        return limit


def _line_is_long(instance: Instance) -> bool:
    """Whether the engine itself holds more waiting requests than keep it fed."""
    if instance.stats is None:
        return False
    load = instance.stats.load
    return load.waiting > max(1, load.max_batch_size * _WAITING_SHARE)


__all__ = ["LEAST", "ConcurrencyLimiter"]
