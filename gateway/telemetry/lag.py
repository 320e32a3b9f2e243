"""How late the event loop is: a task that wants to wake every so often, and notes when it does."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

_EVERY_S: Final = 0.1


async def watch_lag(observe: Callable[[float], None]) -> None:
    """Tell ``observe`` ten times a second how many seconds too late the loop was; for ever."""
    while True:
        due_s = monotonic() + _EVERY_S
        await asyncio.sleep(_EVERY_S)
        observe(max(0.0, monotonic() - due_s))


__all__ = ["watch_lag"]
