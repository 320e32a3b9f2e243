"""From an instance's answer to the client, byte for byte, except where the answer is an error in a foreign shape.

A stream goes out event by event as it comes. Anything else is read to its end first: its usage is accounted, and an
instance that dies within it leaves the client with a clear error instead of half a JSON text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from gateway.envelopes import after_error, envelope_of_answer, stream_error
from gateway.errors import UpstreamTimeoutError, UpstreamUnreachableError
from gateway.types import Dialect, Operation, Usage
from gateway.upstream.client import FailureKind, UpstreamFailureError, UpstreamResponse
from gateway.upstream.headers import Header, towards_client
from gateway.upstream.sse import EventScanner, scanner_for, usage_of_answer

_MAX_WHOLE_BYTES = 64 << 20


class Reply(Protocol):
    """Where the answer goes."""

    async def start(self, status: int, headers: Sequence[Header]) -> None: ...

    async def send(self, data: bytes) -> None: ...

    async def finish(self, data: bytes = b"") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """How an answer ended. ``failure`` is set when the instance failed within it, after the client got its first
    bytes.
    """

    status: int
    usage: Usage | None
    failure: str | None


async def relay(
    response: UpstreamResponse,
    reply: Reply,
    *,
    operation: Operation,
    own_headers: Sequence[Header],
    hide_usage: bool,
) -> Relayed:
    """Pass one answer on. Raises ``UpstreamFailureError`` only while the client has not been sent anything."""
    headers = [*towards_client(response.headers), *own_headers]
    if not response.readable:
        return await _pass(response, reply, headers)
    if response.status >= HTTPStatus.BAD_REQUEST:
        return await _error(response, reply, headers, operation.dialect)
    if response.is_event_stream:
        scanner = scanner_for(operation.dialect, hide_usage=hide_usage, generate=operation is Operation.GENERATE)
        return await _stream(response, reply, headers, (scanner, operation.dialect))
    return await _whole(response, reply, headers)


async def _stream(
    response: UpstreamResponse, reply: Reply, headers: Sequence[Header], watched: tuple[EventScanner, Dialect]
) -> Relayed:
    scanner, dialect = watched
    failure: str | None = None
    data = await response.read()
    await reply.start(response.status, headers)
    try:
        while data:
            if out := scanner.feed(data):
                await reply.send(out)
            data = await response.read()
    except UpstreamFailureError as error:
        failure = error.kind
        await reply.send(_error_events(error, dialect))
    else:
        if rest := scanner.rest():
            await reply.send(rest)
        if scanner.failed:
            failure = "error_event"
            if not scanner.done and (end := after_error(dialect)):
                await reply.send(end)
        elif not scanner.done:
            failure = FailureKind.CUT
            cut = UpstreamFailureError(FailureKind.CUT, "the engine ended its stream without finishing it")
            await reply.send(_error_events(cut, dialect))
    await reply.finish()
    return Relayed(status=response.status, usage=scanner.usage, failure=failure)


async def _whole(response: UpstreamResponse, reply: Reply, headers: Sequence[Header]) -> Relayed:
    body, complete = await _read(response)
    if not complete:
        return await _pass(response, reply, headers, first=body)
    await reply.start(response.status, [*headers, (b"content-length", str(len(body)).encode())])
    await reply.finish(body)
    return Relayed(status=response.status, usage=usage_of_answer(body), failure=None)


async def _error(response: UpstreamResponse, reply: Reply, headers: Sequence[Header], dialect: Dialect) -> Relayed:
    said, complete = await _read(response)
    body = envelope_of_answer(response.status, said if complete else b"", dialect)
    if body is not said:
        headers = [(name, value) for name, value in headers if name != b"content-type"]
        headers.append((b"content-type", b"application/json"))
    await reply.start(response.status, [*headers, (b"content-length", str(len(body)).encode())])
    await reply.finish(body)
    return Relayed(status=response.status, usage=None, failure=None)


async def _pass(response: UpstreamResponse, reply: Reply, headers: Sequence[Header], *, first: bytes = b"") -> Relayed:
    """Pass an answer on unseen: one in an encoding that can't be read here, or too long to be held."""
    data = first or await response.read()
    await reply.start(response.status, headers)
    while data:
        await reply.send(data)
        try:
            data = await response.read()
        except UpstreamFailureError as error:
            # Neither an error event nor an envelope fits here. Not finishing makes the server end the connection
            # without the last chunk, so that the client sees a broken answer and not a short one.
            return Relayed(status=response.status, usage=None, failure=error.kind)
    await reply.finish()
    return Relayed(status=response.status, usage=None, failure=None)


async def _read(response: UpstreamResponse) -> tuple[bytes, bool]:
    """Read a body whole; False with what has been read when it is longer than what may be held."""
    first = await response.read()
    parts = [first]
    size = len(first)
    while data := await response.read():
        parts.append(data)
        size += len(data)
        if size > _MAX_WHOLE_BYTES:
            return b"".join(parts), False
    return (first if len(parts) == 1 else b"".join(parts)), True


def _error_events(error: UpstreamFailureError, dialect: Dialect) -> bytes:
    timed_out = error.kind in {FailureKind.IDLE_TIMEOUT, FailureKind.FIRST_BYTE_TIMEOUT}
    kind = UpstreamTimeoutError if timed_out else UpstreamUnreachableError
    code = "upstream_timeout" if timed_out else "upstream_cut"
    return stream_error(dialect, status=kind.status, message=str(error), kind=kind.type, code=code)


__all__ = ["Relayed", "Reply", "relay"]
