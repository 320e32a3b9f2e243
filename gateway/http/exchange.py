"""One HTTP exchange over raw ASGI: the request's headers and body, and the reply.

Raw because Starlette's StreamingResponse costs half a millisecond a request, which is most of what a proxied request
costs here.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

from gateway.errors import ApiError, BodyTimeoutError, BodyTooLargeError, InvalidRequestError
from gateway.http.headers import Header
from gateway.types import Dialect

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CONNECTION = "kvgate.connection"
"""The scope's key for the server's own connection, which knows more than ASGI tells."""
TAKE_BODY = "kvgate.take_body"
"""The scope's key for what gives the request's body where all of it is there, None otherwise."""

_EVENTS = b"text/event-stream"
_QUERY = re.compile(rb"[!-~]*")
_DRAIN_BYTES = 64 << 20
_DRAIN_S = 2.0


class Connection(Protocol):
    """Tells when the client goes away and whether it keeps up, without the task and the timers that ASGI would need;
    and writes what is sent between ``hold`` and ``release`` at once.
    """

    event_stream: bool

    @property
    def full(self) -> bool: ...

    def abort(self) -> None: ...

    def watch(self, gone: Callable[[], object]) -> None: ...

    def unwatch(self) -> None: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...


class EarlyHead(Protocol):
    """A stream's head that is sent before its answer. ``waiting``: sent, and no answer has followed."""

    @property
    def waiting(self) -> bool: ...

    async def end(self, fault: ApiError, /) -> None: ...


class ClientGoneError(Exception):
    """The client closed its connection; no answer can be delivered."""


class Exchange:
    """Reads once, replies once. ``started`` says whether the client has been sent a status; ``opening`` is there for a
    stream, and may have begun it before there is an answer; ``dialect`` is whose API
    its errors speak; ``extra_headers`` go out with whatever answer it gets (a limit's remainder, for example).
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        send_timeout_s: float,
        dialect: Dialect = Dialect.OPENAI,
    ) -> None:
        self.dialect = dialect
        self.extra_headers: list[Header] = []
        self.headers: Sequence[Header] = scope["headers"]
        self.http_version: str = scope.get("http_version", "1.1")
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.started = False
        self.opening: EarlyHead | None = None
        self._finished = False
        self._connection: Connection | None = scope.get(CONNECTION)
        self._take_body: Callable[[], bytes | None] | None = scope.get(TAKE_BODY)
        self._receive = receive
        self._send = send
        self._send_timeout_s = send_timeout_s
        self._by_name: dict[bytes, bytes] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header, its name in lower case."""
        if self._by_name is None:
            self._by_name = dict(reversed(self.headers))
        return self._by_name.get(name)

    def target(self, path: bytes) -> bytes:
        """Return a path with the request's own query, as it came.

        Raises ``InvalidRequestError`` for one with bytes that end a request line, or belong in no URL.
        """
        if not self.query:
            return path
        if not _QUERY.fullmatch(self.query):
            raise InvalidRequestError("the query of the address holds bytes that no address may: encode them as %XX")
        return path + b"?" + self.query

    async def read_body(self, *, limit_bytes: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
        """Return the whole body in the encoding that it has, never holding more than ``limit_bytes``. ``take`` is
        called with the number of bytes as they come, and may raise.

        Raises ``BodyTooLargeError``, ``BodyTimeoutError``, ``ClientGoneError``.
        """
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
            await self._drain()
            raise _too_large(limit_bytes)
        if self._take_body is not None and (body := self._take_body()) is not None:
            if len(body) > limit_bytes:
                raise _too_large(limit_bytes)
            take(len(body))
            return body
        try:
            async with asyncio.timeout(timeout_s):
                return await self._read(limit_bytes, take)
        except TimeoutError:
            raise BodyTimeoutError(f"the request body did not arrive within {timeout_s:g} s") from None

    async def _read(self, limit_bytes: int, take: Callable[[int], None]) -> bytes:
        body = bytearray()  # one memory, however small the parts are that it comes in
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part: bytes = message.get("body", b"")
            if len(body) + len(part) > limit_bytes:
                await self._drain()
                raise _too_large(limit_bytes)
            take(len(part))
            if not body and not message.get("more_body", False):
                return part
            body += part
            if not message.get("more_body", False):
                return bytes(body)

    async def _drain(self) -> None:
        """Throw away what still comes, for a moment, so that the client gets to read its answer."""
        left = _DRAIN_BYTES
        try:
            async with asyncio.timeout(_DRAIN_S):
                while left > 0:
                    message = await self._receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return

    def watch(self, gone: Callable[[Exception], None]) -> None:
        """Call ``gone`` with ``ClientGoneError`` when the client disconnects, until ``unwatch``.

        The body must have been read before.
        """
        if self._connection is None:
            self._watcher = asyncio.create_task(self._watch(gone))
        else:
            self._connection.watch(partial(gone, ClientGoneError()))

    def unwatch(self) -> None:
        """Idempotent."""
        if self._connection is not None:
            self._connection.unwatch()
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self, gone: Callable[[Exception], None]) -> None:
        """What a server that isn't ours takes."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._finished:  # a finished exchange is reported as disconnected, too
            gone(ClientGoneError())

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        self.started = True
        if self._connection is not None:  # a head alone is not worth a packet
            self._connection.hold()
            for name, value in headers:
                if name == b"content-type":
                    self._connection.event_stream = value.startswith(_EVENTS)
        headers = [*headers, *self.extra_headers] if self.extra_headers else headers
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def flush(self) -> None:
        """Send a head that waits for the data behind it."""
        if self._connection is not None:
            self._connection.release()

    async def send(self, data: bytes) -> None:
        """Send a piece of the body; raises ``ClientGoneError`` when the client has not taken it in time."""
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last piece of the body; raises ``ClientGoneError`` when the client has not taken what was before it
        in time.
        """
        self._finished = True
        await self._put({"type": "http.response.body", "body": data, "more_body": False})

    async def _put(self, message: Message) -> None:
        connection = self._connection
        if connection is not None and not connection.full:  # then it doesn't wait
            await self._send(message)
            connection.release()
            return
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send(message)
        except TimeoutError:
            if connection is not None:  # to close it would be to wait until the client takes the rest
                connection.abort()
            raise ClientGoneError from None
        finally:
            if connection is not None:
                connection.release()

    async def reply(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        """Send a whole JSON answer."""
        await self.start(
            status,
            [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers],
        )
        self._finished = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        if self._connection is not None:
            self._connection.release()

    async def refuse(self, error: ApiError, headers: Sequence[Header] = ()) -> None:
        """Send an error's envelope."""
        extra = [*headers, *error.headers]
        if error.retry_after_s is not None:
            extra.append((b"retry-after", str(error.retry_after_s).encode()))
        if isinstance(error, BodyTooLargeError | BodyTimeoutError):
            extra.append((b"connection", b"close"))
        if error.status == 401:  # noqa: PLR2004 - RFC 9110: a 401 names the scheme
            extra.append((b"www-authenticate", b"Bearer"))
        await self.reply(error.status, error.body(self.dialect), extra)


def _too_large(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body is longer than {limit_bytes} bytes, the longest allowed here")
