"""A client's connection as the server writes to it."""

import asyncio
from typing import Any, Protocol


class Transport(Protocol):
    """The used part of the event loop's transport."""

    def write(self, data: bytes, /) -> None: ...

    def writelines(self, list_of_data: list[bytes], /) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def is_closing(self) -> bool: ...

    def get_write_buffer_size(self) -> int: ...

    def get_extra_info(self, name: str, default: Any = None, /) -> Any: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class ClientTransport:
    """Wraps the loop's transport: it may hold writes, and bounds a close in time.

    The loop's own ``close`` first writes what is left, however long that takes. Here a client that takes nothing of it
    for ``linger_s`` is cut off.
    """

    __slots__ = ("_held", "_linger_s", "_loop", "_timer", "_transport", "last")

    def __init__(self, transport: Transport, *, loop: asyncio.AbstractEventLoop, linger_s: float) -> None:
        self._transport = transport
        self._loop = loop
        self._linger_s = linger_s
        self._held: list[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.last = b""
        """What was written last."""

    @property
    def holds(self) -> bool:
        """Whether writes are held now."""
        return self._held is not None

    def hold(self) -> None:
        """Hold writes until ``release``. Idempotent."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Write the held bytes at once. Idempotent."""
        held, self._held = self._held, None
        if held:
            self._transport.writelines(held)

    def write(self, data: bytes) -> None:
        self.last = data
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def close(self) -> None:
        """Write the rest and close, within bounds. Idempotent."""
        if self._transport.is_closing():
            return
        self.release()
        self._transport.close()
        if left := self._transport.get_write_buffer_size():
            self._linger(left)

    def abort(self) -> None:
        """Close at once; unread bytes are lost. Idempotent."""
        self._held = None
        self._transport.abort()

    def lost(self) -> None:
        """Note that the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def _linger(self, left: int) -> None:
        self._timer = self._loop.call_later(self._linger_s, self._look, left)

    def _look(self, before: int) -> None:
        left = self._transport.get_write_buffer_size()
        if left >= before:
            self._transport.abort()
        else:
            self._linger(left)
