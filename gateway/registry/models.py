"""The models that instances serve, list, or served a while ago."""

from collections.abc import Callable
from typing import Any

from gateway.registry.instance import InstanceState
from gateway.registry.model_memory import ModelMemory
from gateway.registry.table import InstanceTable


class ServedModels:
    """Reads the table; ``absent`` remembers models whose instances have left."""

    def __init__(self, table: InstanceTable, *, memory_s: float, clock: Callable[[], float]) -> None:
        self._table = table
        self.absent = ModelMemory(memory_s, clock)

    def knows(self, model: str) -> bool:
        """Whether an instance, in whatever state, lists this model."""
        return any(each.serves(model) for each in self._table.all())

    def may_serve(self, model: str) -> bool:
        """Whether a model may be served shortly: an instance lists it, one that did has left not long ago, one has not
        listed its models yet, or there is no instance.
        """
        instances = self._table.all()
        return (
            not instances
            or self.absent.remembers(model)
            or any(each.serves(model) or not each.listed for each in instances)
        )

    def cards(self) -> list[dict[str, Any]]:
        """Return one card for each model id of healthy instances that answer: the first one's, with fields that only
        others have.
        """
        cards: dict[str, dict[str, Any]] = {}
        for each in self._table.all():
            if each.state is InstanceState.HEALTHY and not each.draining and each.answers:
                for model in each.models:
                    cards[model.id] = model.card | cards.get(model.id, {})
        return list(cards.values())

    def names(self) -> list[str]:
        """Return the names of the models that healthy instances serve, each once."""
        return list({model.id: None for each in self._table.answering(None) for model in each.models})
