"""Observers of instances that send nothing."""

from collections.abc import Sequence
from typing import Protocol

from gateway.http.headers import Header


class Silence(Protocol):
    """Called in the task that waits, which goes on waiting then. ``after_s`` is infinite where nobody is to be told."""

    @property
    def after_s(self) -> float: ...

    async def headed(self, status: int, headers: Sequence[Header]) -> None:
        """The answer's head has come, once, and nothing behind it for a moment."""
        ...

    async def silent(self) -> None:
        """Nothing has come for ``after_s``, or for so long again."""
        ...
