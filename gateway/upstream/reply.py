"""The interface through which answers reach clients."""

from collections.abc import Sequence
from typing import Protocol

from gateway.http.headers import Header


class Reply(Protocol):
    """One client's answer: ``start``, any number of ``send``, ``finish``. ``flush`` sends a head that waits."""

    async def start(self, status: int, headers: Sequence[Header]) -> None: ...

    def flush(self) -> None: ...

    async def send(self, data: bytes) -> None: ...

    async def finish(self, data: bytes = b"") -> None: ...
