"""One HTTP/1.1 connection to an instance: a request goes out whole, its answer comes in piece by piece.

The parser is httptools (llhttp), which the server uses as well. What is here is the little that a proxy needs around
it: no redirects, cookies, proxies, encodings or header objects, and no timer for each read. aiohttp's client, which has
all of these, took 105 us of processor time a request more.

An answer ends where its framing says. One without a length ends with its connection, and a connection that is lost
earlier makes ``arrival`` raise. Nothing an instance sends between two answers is taken for one: the connection is
closed.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.http.headers import Header

_MOST_HELD_BYTES = 256 << 10
"""More of a body than this is not read from the socket before some of it is taken."""
MOST_HEAD_BYTES = 64 << 10
"""Of an answer's header, interim ones and what follows its body counted in: a name, a value and four more bytes a line.
"""


class ConnectionLostError(Exception):
    """The connection ended before the answer was whole."""


class NoAnswerError(ConnectionLostError):
    """The received bytes are no answer, and the connection was closed; the message names the fault."""


class Connection(asyncio.Protocol):
    """Made by ``loop.create_connection``. Send, then take what arrives until it has ended, then send again if
    ``reusable``.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._parts: list[bytes] = []
        self.held_bytes = 0
        self.arrived_bytes = 0
        """What has come since the last request."""
        self._head_bytes = self._unread_bytes = 0
        self._paused = False
        self._requested = False
        self._in_head = True
        self._interim = False
        self._nudged = self._quiet = False
        self._on_head: Callable[[], object] | None = None
        self._until_eof = False
        self._keep = False
        self._lingering: Callable[[Connection], None] | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self.status = 0
        self.headers: list[Header] = []
        self.head_reported = False
        self.ended = False
        self.waiting = False
        """Whether somebody waits in ``arrival``, since ``waiting_since_s``."""
        self.waiting_since_s = 0.0
        self.idle_since_s = 0.0

    def send(self, head: bytes, body: bytes, on_head: Callable[[], object] | None = None) -> None:
        """Send a request; the answer before it has been read to its end. ``on_head`` is called when the answer's head
        has come, and nothing of its body with it.
        """
        transport = self._transport
        if transport is None:
            self._failure = self._failure or ConnectionLostError("the connection was lost between two requests")
            return
        self.status = 0
        self.headers = []
        self.head_reported = False
        self._parts = []
        self.held_bytes = self.arrived_bytes = self._head_bytes = self._unread_bytes = 0
        self._in_head = self._requested = True
        self.ended = self._interim = self._until_eof = self._keep = self._nudged = self._quiet = False
        self._on_head = on_head
        transport.writelines((head, body))

    async def arrival(self) -> bool:
        """Return True when there is something to take, or the answer has ended; False when there is neither yet, and
        ``nudge`` was called.

        Raises what ``fail`` was given, ``ConnectionLostError`` when there is and will be neither.
        """
        while not self._parts and not self.ended:
            if self._failure is not None:
                raise self._failure
            if self._nudged:
                self._nudged, self._quiet = False, True
                return False
            if not self._quiet:
                self.waiting_since_s = self.loop.time()
            waiter = self._waiter = self.loop.create_future()
            self.waiting = True
            try:
                await waiter
            finally:
                self._waiter = None
                self.waiting = False
        self._quiet = False
        return True

    def nudge(self) -> None:
        """Notify present and later readers that no byte has arrived."""
        self._nudged = True
        self._wake()

    def take(self) -> bytes:
        """Return what has arrived of the body, maybe nothing."""
        parts = self._parts
        if not parts:
            return b""
        self._parts = []
        self.held_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def reusable(self) -> bool:
        """Whether the connection can take the next request."""
        return (
            self.ended
            and self._keep
            and not self._requested
            and self._failure is None
            and self._transport is not None
            and not self._transport.is_closing()
            and not self._transport.get_write_buffer_size()
        )

    def linger(self, seconds: float, ended: "Callable[[Connection], None]") -> None:
        """Drop what still comes of an answer, and call ``ended`` when it has ended, or after so long."""
        self._lingering = ended
        self._linger_timer = self.loop.call_later(seconds, self._lingered)
        self.take()

    def _lingered(self) -> None:
        ended, self._lingering = self._lingering, None
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        if ended is not None:
            ended(self)

    def fail(self, failure: Exception) -> None:
        """Raise this exception in present and later readers, and close the connection."""
        if self._failure is None:
            self._failure = failure
        self.abort()
        self._wake()

    def abort(self) -> None:
        """Drop the connection at once. Idempotent."""
        transport, self._transport = self._transport, None
        self._parser = None
        if transport is not None:
            transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but name

    def connection_lost(self, exc: Exception | None) -> None:
        if self._requested and self._until_eof and exc is None and self._transport is not None:
            self._end()
        self._transport = None
        self._parser = None
        if self._failure is None:
            self._failure = ConnectionLostError("the connection ended")
        self._wake()
        self._lingered()

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            return
        self.arrived_bytes += len(data)
        self._unread_bytes += len(data)
        try:
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.fail(NoAnswerError(f"the response is not valid HTTP: {error}"))
            return
        if self._requested and self._unread_bytes > MOST_HEAD_BYTES:  # the parser keeps a line until it has an end
            self.fail(_header_too_long())
        elif self._parts or self.ended:
            if self.held_bytes > _MOST_HELD_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
            self._wake()
        elif self._on_head is not None and not self._in_head:
            on_head, self._on_head = self._on_head, None
            on_head()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if not self._requested:
            self.fail(NoAnswerError("a response came without a request"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._requested:
            return
        self._unread_bytes = 0
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MOST_HEAD_BYTES:
            self.fail(_header_too_long())
        elif self._in_head:  # those behind the last chunk are not passed on
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._parser is None or not self._requested:
            return
        status = self._parser.get_status_code()
        if not 100 <= status < 600:  # noqa: PLR2004 - RFC 9110, section 15
            self.fail(NoAnswerError(f"the response has the invalid status {status}"))
            return
        if status < 200:  # noqa: PLR2004 - RFC 9110: interim answers come before the real one
            self._interim = True
            return
        self.status = status
        self._in_head = False
        self._until_eof = not any(name in _FRAMING for name, _ in self.headers)

    def on_body(self, body: bytes) -> None:
        if self._parser is None or not self._requested:
            return
        if self._lingering is None:
            self._parts.append(body)
            self.held_bytes += len(body)
        self._unread_bytes = 0

    def on_message_complete(self) -> None:
        if self._parser is None or not self._requested:
            return
        if self._interim:
            self._interim = False
            self.headers = []
            return
        self._keep = self._parser.should_keep_alive()
        self._end()

    def _end(self) -> None:
        self.ended = True
        self._requested = False
        self.idle_since_s = self.loop.time()
        if self._lingering is not None:
            self.loop.call_soon(self._lingered)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _header_too_long() -> NoAnswerError:
    return NoAnswerError(f"its header is longer than {MOST_HEAD_BYTES} bytes")


_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
