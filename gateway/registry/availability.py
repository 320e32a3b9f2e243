"""Which instances may take a request for a model at this moment."""

from gateway.registry.breakers import Breakers
from gateway.registry.instance import Instance, InstanceState
from gateway.registry.table import InstanceTable
from kvcontrol.core.ids import InstanceId


class Availability:
    """Reads the table and the breakers, and changes neither."""

    def __init__(self, table: InstanceTable, breakers: Breakers) -> None:
        self._table = table
        self._breakers = breakers

    def usable(self, model: str | None = None) -> tuple[Instance, ...]:
        """Return the instances that may answer requests (for ``model``) now. While all instances wait for the outcome
        of a trial, there are none.
        """
        return self._breakers.open_to_requests(self._table.answering(model)) or self.standing_in(model)

    def standing_in(self, model: str | None = None) -> tuple[Instance, ...]:
        """Return the instances that prefill for others, and may answer where no other instance can."""
        if not self._table.any_prefilling:
            return ()
        return self._breakers.open_to_requests(self._table.healthy(model, lambda each: each.stands_in))

    def serving(self, model: str | None = None) -> tuple[Instance, ...]:
        """Return the healthy instances that answer (for ``model``), also those whose breakers are open; where there
        are none, those that could stand in.
        """
        return self._table.answering(model)

    def only_prefilling(self, model: str) -> tuple[Instance, ...]:
        """Return the healthy instances that serve ``model`` and can answer nothing."""
        return self._table.healthy(model, lambda each: not each.answers)

    def prefilling(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that may compute a prompt for ``model`` for others. O(such instances)."""
        if not self._table.any_prefilling:
            return ()
        return self._breakers.open_to_requests(
            [
                each
                for each in self._table.prefilling
                if each.state is InstanceState.HEALTHY and not each.draining and each.serves(model)
            ]
        )

    def on_trial(self, model: str) -> bool:
        """Whether no instance is usable now, and the trial of one that serves ``model`` is under way."""
        return self._breakers.on_trial(self._table.answering(model))

    def left_alone_s(self, model: str) -> float:
        """Return for how long breakers keep requests from all that serve ``model``: 0 when one is free of them."""
        return self._breakers.left_alone_s(self._table.answering(model))

    @property
    def troubled(self) -> bool:
        """Whether any instance's breaker is not closed."""
        return self._breakers.troubled

    def on_probation(self, instance: InstanceId) -> bool:
        """Whether an instance gets one request at a time now; an unknown one does not."""
        return self._breakers.on_probation(instance)
