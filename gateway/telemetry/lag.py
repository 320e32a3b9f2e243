"""How late the event loop is: a task that wants to wake every so often, and notes when it does."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

_EVERY_S: Final = 0.1


class LoopLag:
    """Tells ``observe`` ten times a second how many seconds too late the loop was, and adds them up."""

    def __init__(self, observe: Callable[[float], None], *, clock: Callable[[], float] = monotonic) -> None:
        self._observe = observe
        self._clock = clock
        self._due_s: float | None = None
        self._total_s = 0.0

    @property
    def total_s(self) -> float:
        """How many seconds the loop has been late in all, those included by which it is late just now."""
        return self._total_s + (0.0 if self._due_s is None else max(0.0, self._clock() - self._due_s))

    async def run(self) -> None:
        """Watch it, for ever."""
        while True:
            self._due_s = self._clock() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            late_s = max(0.0, self._clock() - self._due_s)
            self._due_s = None
            self._total_s += late_s
            self._observe(late_s)
