"""Calls that run on an engine's own thread, between two of its steps."""

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

CALL_TIMEOUT_S: Final = 1.5
"""Less than a server waits for its engine process: a busy engine is reported as busy."""

_Answer = TypeVar("_Answer")


class EngineBusyError(RuntimeError):
    """The engine's loop has not started, has ended, or did not get to the call in time."""


class CallEngine(Protocol):
    """Runs work where an engine's blocks may be changed. Any thread but the engine's, where the engine has its own."""

    def __call__(self, work: Callable[[], _Answer], *, timeout_s: float) -> _Answer:
        """Return the result of ``work()`` or raise its error; ``EngineBusyError`` if it has not begun after
        ``timeout_s``.
        """


def call_at_once(work: Callable[[], _Answer], *, timeout_s: float) -> _Answer:
    """Call an engine that lives on the caller's thread."""
    del timeout_s
    return work()
