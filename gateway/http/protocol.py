"""The HTTP server's connections, with bounds that uvicorn's own don't have.

They are on the time and the size of a request's line and headers, on the time of its body, and on that of a client to
take its answer. A request names the host that it is for exactly once (RFC 9112, section 3.2).

Without them a client that opens a connection and sends nothing, or one byte a second, holds it for ever, and a header
without an end grows in memory. What the parser refuses is answered in OpenAI's envelope, after the answers to the
requests before it.
"""

import re
import sys
from asyncio import TimerHandle, Transport
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Final, NamedTuple, cast

from httptools import HttpRequestParser
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.errors.envelopes import envelope
from gateway.http.client_link import ClientLink, ClientProbe
from gateway.http.exchange import CONNECTION, TAKE_BODY
from gateway.http.request_body import Body, take_body
from gateway.http.transport import ClientTransport

CLOSE: Final = (b"connection", b"close")
_OFFERS = frozenset({b"upgrade", b"http2-settings"})
_LATE_S = 5.0
"""A body's bound here is so much later than the one that answers with 408: it is for whoever doesn't read bodies."""

_MOST_WAITING: Final = 16
"""Requests that are read while another one of their connection is answered."""


_VERSIONS = frozenset({"1.0", "1.1"})
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")


class _Refusal(NamedTuple):
    """The answers to bytes that are no request."""

    status: HTTPStatus
    code: str
    message: str


_NO_HTTP: Final = _Refusal(HTTPStatus.BAD_REQUEST, "invalid_http", "this is not a valid HTTP request")
_WRONG_HOST: Final = _Refusal(
    HTTPStatus.BAD_REQUEST,
    "invalid_host",
    "a request has exactly one Host header: the name or address of a host, maybe with a port",
)
_UNKNOWN_CODING: Final = _Refusal(
    HTTPStatus.NOT_IMPLEMENTED,
    "unsupported_transfer_coding",
    "the only Transfer-Encoding that is understood here is chunked",
)


class _RefusedError(Exception):
    """Raised within the parser's callbacks; ends the request, and ``_refusal`` has the answer."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A timer runs whenever more of a request is awaited, except between two requests.

    uvicorn makes its connections of a class, so the bounds are the class's: see ``bounded_protocol``.
    """

    header_timeout_s: ClassVar[float]
    body_timeout_s: ClassVar[float]
    send_timeout_s: ClassVar[float]
    max_header_bytes: ClassVar[int]

    _arrived = b""
    _offered = False
    _head_bytes = 0
    _head_begun = False
    _refusal = _NO_HTTP
    _last_words: bytes | None = None
    _active: RequestResponseCycle | None = None
    _reading: RequestResponseCycle | None = None
    _timer: TimerHandle | None = None
    _writer: ClientTransport
    _link: ClientLink
    _probe: ClientProbe

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        self._writer = ClientTransport(transport, loop=self.loop, linger_s=self.send_timeout_s)
        super().connection_made(cast("Transport", self._writer))
        self._link = ClientLink(self._writer, self.flow)
        self._probe = ClientProbe(self.loop, self._writer, self._link)
        self._arm(self.header_timeout_s)

    @property
    def fresh(self) -> bool:
        """Whether no request has come yet."""
        return self._active is None

    def close_after_answer(self) -> None:
        """End the connection with the answer that is under way, which has the header for it where it has not begun."""
        if self._active is not None:
            self._active.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._writer.lost()
        self._probe.stop()
        active = self._active
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()
        super().connection_lost(exc)
        self._link.lost()

    @property
    def _answering(self) -> bool:
        """Whether a request has arrived whose answer has not ended."""
        return self._active is not None and not self._active.response_complete

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        if self._reading is None and self._timer is None:  # the first bytes of a connection's next request
            self._arm(self.header_timeout_s)
        begun = self._head_begun
        self._arrived = data
        super().data_received(data)
        if begun and self._head_begun:  # a header without an end is not passed on until it has one
            self._head_bytes += len(data)
            if self._head_bytes > self.max_header_bytes and not self.transport.is_closing():
                self.send_400_response("")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answers where a client has sent all that it will, or has gone: both look alike.

        So the client is probed: see ``ClientProbe``.
        """
        active = self._active
        if active is None or self._reading is not None or not self._probe.possible(active):
            self.transport.close()
            return False
        if self._last_words is None:
            self._last_words = b""
        self._probe.send()
        return True

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._head_begun = True
        super().on_message_begin()
        self.scope[CONNECTION] = self._link  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > self.max_header_bytes:
            raise _RefusedError
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self.max_header_bytes:
            raise _RefusedError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_begun = False
        self._disarm()
        version = self.parser.get_http_version()
        if version not in _VERSIONS:  # for llhttp a line without a version is HTTP/0.9, and headers may follow
            raise _RefusedError
        if (refusal := _refusal_of(self.headers, version)) is not None:
            self._refusal = refusal
            raise _RefusedError
        self._offered = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._offered:
            return
        self._arm(self.body_timeout_s + _LATE_S)
        super().on_headers_complete()
        self._reading = cycle = self.cycle
        cycle.body = Body()  # type: ignore[assignment]
        self.scope[TAKE_BODY] = partial(take_body, cycle)  # type: ignore[literal-required]
        if self.pipeline and len(self.pipeline) < _MOST_WAITING:
            self.flow.resume_reading()  # who doesn't read sees no end: uvicorn would wait for the answer before it

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = self._link.active = cycle
        self._link.event_stream = False
        super()._start_asgi_task(cycle, _unframed(cycle, app) if cycle.scope["http_version"] == "1.0" else app)

    def on_message_complete(self) -> None:
        if self._offered:
            return
        self._disarm()
        self._reading = None
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._writer.last = b""  # an idle connection is not to keep a long answer
        super().on_response_complete()
        if self._last_words is not None and not self._answering and not self.transport.is_closing():
            self._end(self._last_words)

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
        """Refuse bytes that the parser rejected, after the answers to earlier requests, and close."""
        del msg
        if self.transport.is_closing() or self._last_words is not None:
            return
        refusal = self._refusal
        if self._head_bytes > self.max_header_bytes:
            refusal = _Refusal(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                "headers_too_large",
                f"the request's line and headers are longer than {self.max_header_bytes} bytes, the most allowed",
            )
        body = envelope(refusal.message, kind="invalid_request_error", code=refusal.code)
        last_words = (
            STATUS_LINE[refusal.status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        self._disarm()
        broken, self._reading = self._reading, None
        if broken is not None and broken is self._active:
            self._end(b"" if broken.response_started else last_words)
            return
        if broken is not None and self.pipeline:
            self.pipeline.popleft()  # the latest: its body is no body
        if self._answering:
            self._last_words = last_words
        else:
            self._end(last_words)

    def _end(self, last_words: bytes) -> None:
        if last_words:
            self._writer.write(last_words)
        self.transport.close()

    def _arm(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._too_late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        """End the connection, after the answers to the requests that have come whole."""
        self._timer = None
        if self._answering and self._reading is not self._active:
            if self._reading is not None and self.pipeline:
                self.pipeline.popleft()
            self._reading, self._last_words = None, b""
        else:
            self.transport.close()


def _refusal_of(headers: list[tuple[bytes, bytes]], version: str) -> _Refusal | None:
    """Return why a request with these headers is refused; None when it isn't."""
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if not _HOST.fullmatch(value):
                hosts = 2
        elif name == b"transfer-encoding" and (version == "1.0" or value.strip().lower() != b"chunked"):
            return _NO_HTTP if version == "1.0" else _UNKNOWN_CODING
    if hosts > 1 or (not hosts and version != "1.0"):
        return _WRONG_HOST
    return None


def _unframed(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return the app for a client of HTTP/1.0: it knows no chunks, so an answer of unknown length ends with its
    connection.
    """

    async def answer(scope: Any, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        unknown = False

        async def send_unframed(message: ASGISendEvent) -> None:
            nonlocal unknown
            if message["type"] == "http.response.start":
                unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                if unknown:
                    cycle.chunked_encoding = False
            elif unknown and message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unframed)

    return answer


def bounded_protocol(
    *, header_timeout_s: float, body_timeout_s: float, send_timeout_s: float, max_header_bytes: int
) -> type[BoundedProtocol]:
    """Return the protocol class that uvicorn is to make its connections of."""

    class Bounded(BoundedProtocol):
        pass

    Bounded.header_timeout_s = header_timeout_s
    Bounded.body_timeout_s = body_timeout_s
    Bounded.send_timeout_s = send_timeout_s
    Bounded.max_header_bytes = max_header_bytes
    return Bounded
