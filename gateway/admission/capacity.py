"""How many more requests instances may be given now: limits, load, trials, and requests of the highest class."""

from collections.abc import Sequence
from typing import Final

from gateway.admission.limiter import ConcurrencyLimiter, FreePlaces
from gateway.admission.urgent import Urgent
from gateway.registry import Instance, LoadTracker
from gateway.registry.availability import Availability

_ON_PROBATION: Final = 1


class Capacity:
    """Reads load and breakers; ``urgent`` counts the slots of the highest class at instances."""

    def __init__(self, *, limiter: ConcurrencyLimiter, load: LoadTracker, available: Availability) -> None:
        self._limiter = limiter
        self._load = load
        self._available = available
        self.urgent = Urgent()

    def free_places(self, instances: Sequence[Instance]) -> list[FreePlaces]:
        """Return how many more requests each instance may be given, by their claim; one, where that is its trial."""
        load, urgent, places_of = self._load, self.urgent, self._limiter.free_places
        if urgent:
            places = [places_of(each, load.in_flight(each.id), urgent.at(each.id)) for each in instances]
        else:
            places = [places_of(each, load.in_flight(each.id)) for each in instances]
        if self._available.troubled:
            places = [
                _on_probation(free) if self._available.on_probation(each.id) else free
                for each, free in zip(instances, places, strict=True)
            ]
        return places

    def has_slot(self, instances: Sequence[Instance], *, unplaced: int) -> list[bool]:
        """Return whether one more request may be admitted, by its claim, beside ``unplaced`` places."""
        return [sum(of_claim) > unplaced for of_claim in zip(*self.free_places(instances), strict=True)]

    def answered(self, instance: Instance, *, after_s: float) -> None:
        """Note when an instance's answer began."""
        load = self._load
        self._limiter.answered(
            instance, after_s=after_s, in_flight=load.in_flight(instance.id), answering=load.answering(instance.id)
        )

    def overloaded(self, instance: Instance) -> None:
        """Note that an instance could not take a request."""
        self._limiter.overloaded(instance, answering=self._load.answering(instance.id))

    def limit(self, instance: Instance) -> int:
        """Return how many requests an instance may have now."""
        return self._limiter.limit(instance)

    def watch(self, instances: tuple[Instance, ...]) -> None:
        """Adapt the limits to what instances report."""
        self._limiter.watch(instances)


def _on_probation(free: FreePlaces) -> FreePlaces:
    high, normal, low = (min(places, _ON_PROBATION) for places in free)
    return high, normal, low
