"""One request to one instance. The only place that knows the HTTP library and its exceptions."""

import asyncio
import io
import zlib
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import aiohttp
from aiohttp.abc import AbstractResolver

from gateway.interrupt import Interrupt, InterruptError
from gateway.upstream.headers import Header
from gateway.upstream.timeouts import Timeouts

_ONE_WRITE_BYTES = 1 << 20
"""Longer bodies are written piece by piece, so that the event loop goes on in between."""


class FailureKind(StrEnum):
    """How an instance failed a request."""

    CONNECT = "connect"  # refused or unreachable
    CONNECT_TIMEOUT = "connect_timeout"
    NO_ANSWER = "no_answer"  # the connection ended before any byte of the answer
    HUNG = "hung"  # it failed its health checks while the request waited for its first byte
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    CUT = "cut"  # the connection ended within the answer
    IDLE_TIMEOUT = "idle_timeout"
    BAD_ENCODING = "bad_encoding"  # the answer's content-encoding doesn't fit its bytes


class UpstreamFailureError(Exception):
    """An instance failed a request; the message is fit for the client."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


Hung = Callable[[], asyncio.Future[None]]
"""Gives what is done while the instance is out because of its failed health checks, and pending otherwise."""


class _Decoder(Protocol):
    def decode(self, data: bytes) -> bytes: ...


class _Identity:
    def decode(self, data: bytes) -> bytes:
        return data


class _Inflate:
    """gzip and deflate; an engine may send them although it wasn't asked to."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=47)

    def decode(self, data: bytes) -> bytes:
        try:
            return self._inflate.decompress(data)
        except zlib.error as error:
            raise UpstreamFailureError(
                FailureKind.BAD_ENCODING, f"the engine's compressed answer is damaged: {error}"
            ) from error


class UpstreamResponse:
    """An answer whose first bytes have arrived. Close it in any case; closing early drops the connection, which makes
    the engine stop working on it.
    """

    def __init__(
        self,
        answer: aiohttp.ClientResponse,
        first: bytes,
        *,
        timeouts: Timeouts,
        hung: Hung,
    ) -> None:
        self._answer = answer
        self._first: bytes | None = first
        self._timeouts = timeouts
        self._hung = hung
        self.status = answer.status
        headers: list[Header] = list(answer.raw_headers)
        coding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        self._decoder: _Decoder = _Identity()
        if coding in {"gzip", "x-gzip", "deflate"}:
            self._decoder = _Inflate()
            headers = [(name, value) for name, value in headers if name.lower() != b"content-encoding"]
        self.readable = coding in {"identity", "", "gzip", "x-gzip", "deflate"}
        self.headers: Sequence[Header] = headers
        self.is_event_stream = answer.content_type == "text/event-stream"

    async def read(self) -> bytes:
        """Return the next bytes of the body, decoded, as soon as there are any; empty at its end.

        Raises ``UpstreamFailureError`` when it ends too early, or is silent for too long.
        """
        while True:
            if self._first is not None:
                data, self._first = self._first, None
            else:
                data = await self._next()
            if not data:
                return b""
            if decoded := self._decoder.decode(data):
                return decoded

    async def _next(self) -> bytes:
        silent_s = 0.0
        idle_s = self._timeouts.idle_s
        try:
            while silent_s < idle_s:
                wait_s = min(self._timeouts.hung_s, idle_s - silent_s)
                try:
                    async with asyncio.timeout(wait_s):
                        return await self._answer.content.readany()
                except TimeoutError:
                    silent_s += wait_s
                if self._hung().done():
                    raise UpstreamFailureError(
                        FailureKind.IDLE_TIMEOUT, "the engine stopped answering within its answer"
                    )
            raise UpstreamFailureError(
                FailureKind.IDLE_TIMEOUT, f"the engine was silent for {idle_s:g} s within its answer"
            )
        except (aiohttp.ClientError, OSError):
            raise UpstreamFailureError(FailureKind.CUT, "the engine's connection ended within its answer") from None

    def close(self) -> None:
        """Idempotent. A fully read answer gives its connection back, any other one closes it."""
        self._answer.close() if not self._answer.content.at_eof() else self._answer.release()


class UpstreamClient:
    """Sends requests over one pooled session, with a bound on every wait and none on the length of an answer."""

    def __init__(self, session: aiohttp.ClientSession, timeouts: Timeouts) -> None:
        self._session = session
        self._timeouts = timeouts

    async def open(self, url: str, *, headers: Sequence[tuple[str, str]], body: bytes, hung: Hung) -> UpstreamResponse:
        """POST a body and return once the first byte of the answer's body is there (or its empty end).

        ``hung`` ends the wait as soon as it is done, and a later silence soon. Raises ``UpstreamFailureError``.
        Cancelling it closes the connection.
        """
        interrupt = Interrupt()
        stuck = hung()
        stuck.add_done_callback(interrupt.fire)
        try:
            with interrupt:
                async with asyncio.timeout(self._timeouts.first_byte_s):
                    answer, first = await self._open(url, headers, body)
        except InterruptError:
            raise UpstreamFailureError(FailureKind.HUNG, "the engine stopped answering") from None
        except TimeoutError:
            raise UpstreamFailureError(
                FailureKind.FIRST_BYTE_TIMEOUT, f"the engine sent nothing for {self._timeouts.first_byte_s:g} s"
            ) from None
        finally:
            stuck.remove_done_callback(interrupt.fire)
        return UpstreamResponse(answer, first, timeouts=self._timeouts, hung=hung)

    async def _open(
        self, url: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        try:
            data = body if len(body) <= _ONE_WRITE_BYTES else io.BytesIO(body)
            answer = await self._session.post(url, data=data, headers=headers, allow_redirects=False)
        except aiohttp.ConnectionTimeoutError as error:
            raise UpstreamFailureError(FailureKind.CONNECT_TIMEOUT, "connecting to the engine took too long") from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamFailureError(FailureKind.CONNECT, f"the engine can't be reached: {error.strerror}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamFailureError(
                FailureKind.NO_ANSWER, "the engine closed the connection before it answered"
            ) from error
        try:
            first = await answer.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            answer.close()
            raise UpstreamFailureError(
                FailureKind.NO_ANSWER, "the engine closed the connection before it answered"
            ) from error
        except BaseException:
            answer.close()
            raise
        return answer, first


def make_session(timeouts: Timeouts, resolver: AbstractResolver | None = None) -> aiohttp.ClientSession:
    """Return a session without a limit on connections, total time or decompression; close it at the end. ``resolver``
    looks names up instead of the system's own.

    Idle connections are dropped after 4 s: uvicorn's servers close theirs after 5 s, and a request must not meet that.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0, ttl_dns_cache=30, resolver=resolver),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s, connect=None, sock_read=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        read_bufsize=1 << 18,
    )


__all__ = ["FailureKind", "UpstreamClient", "UpstreamFailureError", "UpstreamResponse", "make_session"]
