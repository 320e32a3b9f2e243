"""Which models were served a while ago: their absence is taken for a temporary one."""

from collections.abc import Callable, Iterable


class ModelMemory:
    """Remembers each model for ``memory_s`` after an instance that served it has left, or has stopped listing it.

    Holds the names that instances have listed, and none that clients have sent.
    """

    def __init__(self, memory_s: float, clock: Callable[[], float]) -> None:
        self._memory_s = memory_s
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def left(self, models: Iterable[str]) -> None:
        """Note that an instance serves these models no longer. O(models remembered)."""
        now_s = self._clock()
        self._until_s = {model: until_s for model, until_s in self._until_s.items() if until_s > now_s}
        self._until_s |= dict.fromkeys(models, now_s + self._memory_s)

    def remembers(self, model: str) -> bool:
        return self._until_s.get(model, float("-inf")) > self._clock()
