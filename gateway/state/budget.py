"""One time limit for all calls to the store that a request makes.

Each call has a limit of its own, so a slow database would multiply it by the number of calls. Inside
``shared_store_time`` the calls of a task together have as long to begin as a single one; the call that has begun then
still ends within its own limit. Tasks that the block starts, which may outlive it, are not bounded.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class StoreTime:
    """How long the calls of one task have taken so far."""

    task: "asyncio.Task[object] | None"
    spent_s: float = 0.0


_shared: ContextVar[StoreTime | None] = ContextVar("store_time", default=None)


@contextmanager
def shared_store_time() -> Iterator[None]:
    """Let the calls of this task share the time of one while the block runs."""
    token = _shared.set(StoreTime(asyncio.current_task()))
    try:
        yield
    finally:
        _shared.reset(token)


def store_time() -> StoreTime:
    """Return the time that this task's calls share; a new one outside of ``shared_store_time``."""
    task, shared = asyncio.current_task(), _shared.get()
    return shared if shared is not None and shared.task is task else StoreTime(task)
