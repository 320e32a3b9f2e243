"""The HTTP server's connections, with bounds that uvicorn's own don't have.

They are on the time and the size of a request's line and headers, and on the time of its body. A request names the host
that it is for exactly once (RFC 9112, section 3.2).

Without them a client that opens a connection and sends nothing, or one byte a second, holds it for ever, and a header
without an end grows in memory. What the parser refuses is answered in OpenAI's envelope.
"""

import re
import sys
from asyncio import TimerHandle, Transport
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import ClassVar, Protocol, Self

from httptools import HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.api.exchange import CONNECTION, TAKE_BODY
from gateway.envelopes import envelope

_OFFERS = frozenset({b"upgrade", b"http2-settings"})
_LATE_S = 5.0
"""A body's bound here is so much later than the one that answers with 408: it is for whoever doesn't read bodies."""


_VERSIONS = frozenset({"1.0", "1.1"})
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")


class _HeadTooLongError(Exception):
    """Raised within the parser's callbacks; ends the request."""


class _VersionError(Exception):
    """Raised within the parser's callbacks; ends the request."""


class _HostError(Exception):
    """Raised within the parser's callbacks; ends the request."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A timer runs whenever more of a request is awaited, except between two requests.

    uvicorn makes its connections of a class, so the bounds are the class's: see ``bounded_protocol``.
    """

    header_timeout_s: ClassVar[float]
    body_timeout_s: ClassVar[float]
    max_header_bytes: ClassVar[int]

    _arrived = b""
    _offered = False
    _head_bytes = 0
    _in_head = True
    _head_begun = False
    _host_wrong = False
    _timer: TimerHandle | None = None
    _writer: "HeldWriter"
    _gone: Callable[[], object] | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writer = HeldWriter(transport)
        self._arm(self.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)
        if self._gone is not None:
            self._gone()

    def watch(self, gone: Callable[[], object]) -> None:
        """Call ``gone`` when the client goes away, at once when it has; one at a time, until ``unwatch``."""
        self._gone = gone
        if self.transport.is_closing():
            gone()
        else:
            self.flow.resume_reading()  # a long body may have left it paused, and who doesn't read sees no end

    def unwatch(self) -> None:
        self._gone = None

    def hold(self) -> None:
        """Keep what is written from now on, until ``release``."""
        self._writer.hold()

    def release(self) -> None:
        """Write what was kept, in one piece: an answer's head and its body are one system call and one packet."""
        self._writer.release()

    @property
    def full(self) -> bool:
        """Whether what is sent now would have to wait for the client."""
        return bool(self.flow.write_paused)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._timer is None:  # the first bytes of a connection's next request
            self._arm(self.header_timeout_s)
        begun = self._head_begun
        self._arrived = data
        super().data_received(data)
        if begun and self._head_begun:  # a header without an end is not passed on until it has one
            self._head_bytes += len(data)
            if self._head_bytes > self.max_header_bytes and not self.transport.is_closing():
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._head_begun = True
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = self._head_begun = False
        self._disarm()
        hosts = [value for name, value in self.headers if name == b"host"]
        version = self.parser.get_http_version()
        if version not in _VERSIONS:  # for llhttp a line without a version is HTTP/0.9, and headers may follow
            raise _VersionError
        least = 0 if version == "1.0" else 1
        if not least <= len(hosts) <= 1 or (hosts and not _HOST.fullmatch(hosts[0])):
            self._host_wrong = True
            raise _HostError
        self._offered = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._offered:
            return
        self._arm(self.body_timeout_s + _LATE_S)
        super().on_headers_complete()
        self.cycle.body = Body()  # type: ignore[assignment]
        self.scope[TAKE_BODY] = partial(_take_body, self.cycle)  # type: ignore[literal-required]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        cycle.transport = self._writer  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        if self._offered:
            return
        self._disarm()
        self._in_head = True
        self._head_bytes = 0
        super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Decline another protocol, as any server may: the request is read again without the offer.

        Called while the parser's refusal is handled. For it such a request has ended with its head, and a body that
        follows (Java's client offers HTTP/2 with every request) would be lost.
        """
        refused = sys.exception()
        if not self._offered or refused is None:
            super()._unsupported_upgrade_warning()
            return
        self._offered = False
        rest = self._arrived[refused.args[0] :]
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                kept = [each.strip() for each in value.split(b",") if each.strip().lower() not in _OFFERS]
                if kept:
                    lines.append(b"connection: " + b", ".join(kept))
            elif name not in _OFFERS:
                lines.append(name + b": " + value)
        self.parser = HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser could not take, and close."""
        del msg
        if self.transport.is_closing():
            return
        if self._in_head and self._head_bytes > self.max_header_bytes:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            said = f"the request's line and headers are longer than {self.max_header_bytes} bytes, the most allowed"
            code = "headers_too_large"
        elif self._host_wrong:
            status, code = HTTPStatus.BAD_REQUEST, "invalid_host"
            said = "a request has exactly one Host header: the name or address of a host, maybe with a port"
        else:
            status, said, code = HTTPStatus.BAD_REQUEST, "this is not a valid HTTP request", "invalid_http"
        body = envelope(said, kind="invalid_request_error", code=code)
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_header_bytes:
            raise _HeadTooLongError

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._too_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        self.transport.close()


def _take_body(cycle: RequestResponseCycle) -> bytes | None:
    """Return a request's body, once, None unless all of it is there already. It is the request's own: a connection's
    ``cycle`` is that of the last one that was read, which may be waiting behind the one that is being answered.
    """
    if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
        return None
    cycle.message_event.clear()
    body = bytes(cycle.body)
    cycle.body = bytearray()
    return body


class WritesAndCloses(Protocol):
    """What is used of a transport."""

    def write(self, data: bytes, /) -> None: ...

    def writelines(self, list_of_data: list[bytes], /) -> None: ...

    def close(self) -> None: ...

    def is_closing(self) -> bool: ...


class HeldWriter:
    """What uvicorn uses of a connection's transport to answer; may hold what is written back."""

    __slots__ = ("_held", "_transport")

    def __init__(self, transport: WritesAndCloses) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None

    def hold(self) -> None:
        if self._held is None:
            self._held = []

    def release(self) -> None:
        held, self._held = self._held, None
        if held:
            self._transport.writelines(held)

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def close(self) -> None:
        self.release()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class Body:
    """A request's body in the pieces that came, in place of uvicorn's ``bytearray``: mostly there is one, and it is not
    copied twice.
    """

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def __iadd__(self, piece: bytes) -> Self:
        self._pieces.append(piece)
        self._size += len(piece)
        return self

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


def bounded_protocol(*, header_timeout_s: float, body_timeout_s: float, max_header_bytes: int) -> type[BoundedProtocol]:
    """Return the protocol class that uvicorn is to make its connections of."""

    class Bounded(BoundedProtocol):
        pass

    Bounded.header_timeout_s = header_timeout_s
    Bounded.body_timeout_s = body_timeout_s
    Bounded.max_header_bytes = max_header_bytes
    return Bounded


__all__ = ["Body", "HeldWriter", "bounded_protocol"]
