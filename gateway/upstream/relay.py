"""From an instance's answer to the client, byte for byte, except where the answer is an error in a foreign shape.

A stream goes out event by event as it comes, whatever its content type. JSON is read to its end first: its usage is
accounted, and an instance that dies within it leaves the client with a clear error instead of half a JSON text.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Final, NamedTuple

from gateway.errors import ApiError, DeadlineError, ShuttingDownError, UpstreamFailedError, UpstreamTimeoutError
from gateway.http.deadline import Deadline
from gateway.http.headers import Header, towards_client
from gateway.http.status import BAD_REQUEST, NO_CONTENT
from gateway.types import Dialect, Operation, Usage
from gateway.upstream.client import UpstreamResponse
from gateway.upstream.failure import FailureKind, UpstreamFailureError
from gateway.upstream.opening import Opening
from gateway.upstream.refusal import refusal_of_answer, refusal_without_route
from gateway.upstream.reply import Reply
from gateway.upstream.sse import EventScanner, GenerateScanner, is_whole
from gateway.upstream.typed_events import MessagesScanner, ResponsesScanner
from gateway.upstream.usage import usage_of_answer

DEADLINE = "deadline"
"""The failure of an answer that was cut because its request's time was over."""
CANCELLED = "cancelled"
"""The same because an operator has ended it."""
SHUTDOWN = "shutdown"
"""The same because the gateway ends."""
OURS: Final = frozenset({DEADLINE, CANCELLED, SHUTDOWN})
"""The failures that are nobody's fault."""

_CUT_BY: Final[dict[type[ApiError], str]] = {DeadlineError: DEADLINE, ShuttingDownError: SHUTDOWN}
_MAX_WHOLE_BYTES = 64 << 20
_LAST_WORDS_S = 1.0
_INSTANCE = b"x-kvgate-instance"
_BLANK: Final = b"\n\n"
_BEGINS_EVENTS: Final = re.compile(rb"\s*(data|event|id|retry)?:")
_JSON: Final = re.compile(rb"application/([a-z0-9.+-]+\+)?json\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """How an answer ended. ``failure`` is set when the instance failed within it, after the client got its first
    bytes; ``refused`` says that the engine's error is the request's own fault.
    """

    status: int
    usage: Usage | None
    failure: str | None
    refused: bool = False

    @property
    def settled_status(self) -> int:
        """The status by which a request pays: a stream's own is 200 whatever came of it."""
        if self.failure is None:
            return self.status
        return BAD_REQUEST if self.refused else HTTPStatus.BAD_GATEWAY


class AnswerShape(NamedTuple):
    """What the request was: ``answers`` is how many choices it wants, ``hide_usage`` says that the gateway asked for
    usage which its client did not ask for.
    """

    operation: Operation
    stream: bool
    answers: int = 1
    hide_usage: bool = False


async def relay(  # noqa: PLR0913 - called at one place, by name
    response: UpstreamResponse,
    reply: Reply,
    *,
    shape: AnswerShape,
    own_headers: Sequence[Header],
    deadline: Deadline,
    paused: Callable[[float], None],
    opening: Opening | None = None,
) -> Relayed:
    """Pass one answer on. Raises ``UpstreamFailureError`` only while the client has not been sent anything of one.

    A stream whose ``deadline`` passes ends with an error event; any other answer lets the cancellation through.
    ``paused`` is told the seconds between two pieces of a stream; ``opening`` is that of a request for a stream, which
    may have begun: then what is no stream ends it as an error event.
    """
    own = {name for name, _ in own_headers}
    headers = [*(each for each in towards_client(response.headers) if each[0] not in own), *own_headers]
    if opening is not None:
        if opening.begun:
            return await _under_head(response, reply, headers, shape, _Watched(opening, deadline, paused))
        if _is_no_stream(response, headers):
            response.hush()
    if not response.readable:
        return await _pass(response, reply, headers)
    if response.status >= BAD_REQUEST:
        return await _error(response, reply, headers, shape.operation)
    first = await response.read()
    if not first and response.status != NO_CONTENT:
        raise UpstreamFailureError(FailureKind.EMPTY, f"the engine answered {response.status} with nothing")
    if response.is_event_stream or (shape.stream and _BEGINS_EVENTS.match(first)):
        if not any(name == b"content-type" for name, _ in headers):
            headers.append((b"content-type", b"text/event-stream"))
        opening = opening or Opening(reply, scanner_for(shape), dialect=shape.operation.dialect, after_s=0)
        return await _stream(response, reply, headers, first, _Watched(opening, deadline, paused))
    response.hush()
    if shape.stream and not _is_json(headers):
        return await _pass(response, reply, headers, first=first)
    return await _whole(response, reply, headers, first)


def scanner_for(shape: AnswerShape) -> EventScanner:
    """Return what watches a stream of this operation."""
    match shape.operation.dialect:
        case Dialect.ANTHROPIC:
            return MessagesScanner()
        case Dialect.RESPONSES:
            return ResponsesScanner()
        case Dialect.OPENAI if shape.operation is Operation.GENERATE:
            return GenerateScanner()
        case Dialect.OPENAI:
            return EventScanner(hide_usage=shape.hide_usage, answers=shape.answers)


def _is_no_stream(response: UpstreamResponse, headers: Sequence[Header]) -> bool:
    return response.status >= BAD_REQUEST or not response.readable or _is_json(headers)


def _is_json(headers: Sequence[Header]) -> bool:
    return any(name == b"content-type" and _JSON.match(value) is not None for name, value in headers)


class _Watched(NamedTuple):
    """What a stream is read by, and what may end it."""

    opening: Opening
    deadline: Deadline
    paused: Callable[[float], None]


async def _stream(
    response: UpstreamResponse, reply: Reply, headers: Sequence[Header], first: bytes, watched: _Watched
) -> Relayed:
    opening, deadline, _ = watched
    scanner = opening.scanner
    failure: str | None = None
    await opening.answer(response.status, headers)
    try:
        await _pass_events(response, reply, first, watched)
    except UpstreamFailureError as error:
        failure = error.kind
        await reply.send(_parted(scanner) + _broken_off(scanner, error))
    except asyncio.CancelledError:
        if not deadline.passed():
            raise
        response.close()  # the engine stops now, whatever the client does; all of it may have come, and not gone out
        why = deadline.error
        await _last_words(reply, scanner, why)
        return Relayed(status=response.status, usage=scanner.usage, failure=_CUT_BY.get(type(why), CANCELLED))
    else:
        ending, failure = _ending(scanner)
        if ending:
            await reply.send(ending)
    await reply.finish()
    return Relayed(status=response.status, usage=scanner.usage, failure=failure, refused=scanner.refused)


async def _pass_events(response: UpstreamResponse, reply: Reply, data: bytes, watched: _Watched) -> None:
    """Pass on a stream that begins with ``data``, to its last event: whatever its connection does after that."""
    scanner, paused = watched.opening.scanner, watched.paused
    came_s = monotonic()
    while data:
        if out := scanner.feed(data):
            await reply.send(out)
        if scanner.done:
            response.expect_end()
            return
        if data := await response.read():
            before_s, came_s = came_s, monotonic()
            paused(came_s - before_s)


def _ending(scanner: EventScanner) -> tuple[bytes, str | None]:
    """What has to follow when the engine has said all, and how it failed."""
    rest = scanner.rest()
    if scanner.done:
        return rest, "error_event" if scanner.failed else None
    received = rest + _BLANK if is_whole(rest) else _parted(scanner)
    if scanner.failed:
        return received + scanner.after_error(), "error_event"
    if (last := scanner.finish()) is not None:
        return received + last, None
    cut = UpstreamFailureError(FailureKind.CUT, "the engine ended its stream without finishing it")
    return received + scanner.ending(_ended(cut)), FailureKind.CUT


def _broken_off(scanner: EventScanner, error: UpstreamFailureError) -> bytes:
    """Return what ends a stream whose connection is lost: an engine that said itself why it goes is its own last word,
    and a whole answer is no error.
    """
    if scanner.failed:
        return scanner.after_error()
    last = scanner.finish()
    return scanner.ending(_ended(error)) if last is None else last


def _parted(scanner: EventScanner) -> bytes:
    """What keeps the next event apart from one of which a part has been let pass."""
    return _BLANK if scanner.torn else b""


async def _whole(response: UpstreamResponse, reply: Reply, headers: Sequence[Header], first: bytes) -> Relayed:
    body, complete = await _read(response, first)
    if not complete:
        return await _pass(response, reply, headers, first=body)
    if response.status != NO_CONTENT:  # RFC 9110, section 8.6: it has no length
        headers = [*headers, (b"content-length", str(len(body)).encode())]
    await reply.start(response.status, headers)
    await reply.finish(body)
    return Relayed(status=response.status, usage=usage_of_answer(body), failure=None)


async def _error(response: UpstreamResponse, reply: Reply, headers: Sequence[Header], operation: Operation) -> Relayed:
    received, complete = await _read(response, await response.read())
    dialect = operation.dialect
    refusal = refusal_of_answer(response.status, received if complete else b"", dialect)
    instance = next((value.decode() for name, value in headers if name == _INSTANCE), "")
    refusal = refusal_without_route(refusal, operation, instance)
    body = refusal.body(dialect)
    if body is not received:
        headers = [(name, value) for name, value in headers if name != b"content-type"]
        headers.append((b"content-type", b"application/json"))
    await reply.start(refusal.status, [*headers, (b"content-length", str(len(body)).encode())])
    await reply.finish(body)
    return Relayed(status=refusal.status, usage=None, failure=None, refused=refusal.of_the_request)


async def _under_head(
    response: UpstreamResponse, reply: Reply, headers: Sequence[Header], shape: AnswerShape, watched: "_Watched"
) -> Relayed:
    """Go on with a stream whose head has gone before; what is no stream ends it as an error event."""
    opening, dialect = watched.opening, shape.operation.dialect
    if _is_no_stream(response, headers):
        response.hush()
    first = await response.read()
    if response.status == HTTPStatus.OK and response.readable and _BEGINS_EVENTS.match(first):
        return await _stream(response, reply, headers, first, watched)
    response.hush()
    received, complete = await _read(response, first)
    if response.status < BAD_REQUEST:
        await opening.end(UpstreamFailedError("the engine answered a request for a stream with something else"))
        return Relayed(status=response.status, usage=None, failure=FailureKind.NO_HTTP)
    refusal = refusal_of_answer(response.status, received if complete and response.readable else b"", dialect)
    await opening.end(refusal)
    return Relayed(status=refusal.status, usage=None, failure=None, refused=refusal.of_the_request)


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


async def _read(response: UpstreamResponse, first: bytes) -> tuple[bytes, bool]:
    """Read a body that begins so whole; False with what has been read when it is longer than what may be held."""
    if response.exhausted:
        return first, True
    parts = [first]
    size = len(first)
    while data := await response.read():
        parts.append(data)
        size += len(data)
        if size > _MAX_WHOLE_BYTES:
            return b"".join(parts), False
    return (first if len(parts) == 1 else b"".join(parts)), True


async def _last_words(reply: Reply, scanner: EventScanner, error: ApiError) -> None:
    """End a stream with an error event. Not for long: a client that doesn't read gets a broken answer instead."""
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await reply.finish(_parted(scanner) + scanner.ending(error))
    except TimeoutError:
        return


def _ended(failure: UpstreamFailureError) -> ApiError:
    """Return the error of a stream that its instance ended or fell silent in."""
    if failure.kind in {FailureKind.IDLE_TIMEOUT, FailureKind.FIRST_BYTE_TIMEOUT}:
        return UpstreamTimeoutError(str(failure))
    return UpstreamFailedError(str(failure), code="upstream_cut")
