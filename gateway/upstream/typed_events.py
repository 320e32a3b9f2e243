"""Scanners of streams whose events have types: Responses and Messages. There is no ``[DONE]``, one type is the last.

They keep what events of ours need that continue the stream: the last event's number, and the items that were opened and
not closed. Text events, nearly all of a stream, are recognised by their first line and not parsed.
"""

from typing import ClassVar

import msgspec

from gateway.errors.context_length import CODE as CONTEXT_CODE
from gateway.types import Dialect, Usage
from gateway.upstream.refusal import Refusal, RefusalKind, refusal_of_event
from gateway.upstream.sse import EventScanner, Fault, data_of
from gateway.upstream.usage import ParsedChunk
from kvcontrol.core.errors import UNREADABLE

_TEXT_EVENTS = (
    b"event: response.output_text.delta",
    b"event: response.reasoning_text.delta",
    b"event: response.function_call_arguments.delta",
    b"event: content_block_delta",
)
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "message_stop"})
_NUMBER = b'"sequence_number"'
_READ_AT_ONCE = 64
"""As many text events are kept as they came: what they are in JSON takes fifty times the memory of their text."""
_EMPTY_TEXT: dict[str, object] = {"type": "output_text", "text": "", "annotations": []}
_FAILURES = frozenset({"error", "response.failed"})


class _Delta(msgspec.Struct, frozen=True):
    stop_reason: str | None = None


class TypedEvent(ParsedChunk, frozen=True):
    """What is read of an event besides."""

    delta: _Delta | str | None = None

    index: int | None = None
    output_index: int | None = None
    content_index: int | None = None
    item: msgspec.Raw = msgspec.Raw()
    part: msgspec.Raw = msgspec.Raw()
    sequence_number: int | None = None
    code: str | int | None = None


class _TextEvent(msgspec.Struct, frozen=True):
    """Of the response's parts; the arguments of a call have no index of their own."""

    output_index: int
    delta: str
    content_index: int = 0


_decode = msgspec.json.Decoder(TypedEvent).decode
_decode_text = msgspec.json.Decoder(_TextEvent).decode


def _read(event: bytes) -> TypedEvent | None:
    try:
        return _decode(data_of(event))
    except UNREADABLE:
        return None


class TypedScanner(EventScanner):
    """What both have in common."""

    __slots__ = ()
    dialect: ClassVar[Dialect]

    def __init__(self) -> None:
        super().__init__(hide_usage=False)

    def _look(self, event: bytes) -> bytes:
        if event.startswith(_TEXT_EVENTS):
            return event
        parsed = _read(event)
        if parsed is None:
            return event
        usage = parsed.tokens()
        if usage is not None:
            self.usage = usage if self.usage is None else _joined(self.usage, usage)
        if parsed.type in _FAILURES or (parsed.type is None and parsed.is_error):
            return self._typed_failure(parsed, event)
        self.done = self.done or parsed.type in _ENDS
        self._note(parsed, event)
        return event

    def _note(self, parsed: TypedEvent, event: bytes) -> None:
        """Note what an event opens and closes."""
        raise NotImplementedError

    def _typed_failure(self, parsed: TypedEvent, event: bytes) -> bytes:
        """Pass an engine's error on, or end the stream where its shape or its words are not the dialect's."""
        self.failed = True
        refusal = refusal_of_event(_error_in(parsed, event), self.dialect)
        if refusal is None:
            return event
        self.refused = refusal.of_the_request
        if self._right(parsed, refusal):
            self.done = parsed.type in _ENDS
            return event
        self.done = True
        return self.ending(refusal)

    def _right(self, parsed: TypedEvent, refusal: Refusal) -> bool:
        raise NotImplementedError

    def after_error(self) -> bytes:
        return b""

    def finish(self) -> bytes | None:
        return None


class MessagesScanner(TypedScanner):
    """Anthropic's Messages: content blocks are open between their start and their stop."""

    __slots__ = ("_open", "_stopped")
    dialect = Dialect.ANTHROPIC

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[int, None] = {}
        self._stopped = False

    def _note(self, parsed: TypedEvent, event: bytes) -> None:
        del event
        if parsed.type == "message_delta":
            self._stopped = isinstance(parsed.delta, _Delta) and parsed.delta.stop_reason is not None
        elif parsed.type == "content_block_start" and parsed.index is not None:
            self._open[parsed.index] = None
        elif parsed.type == "content_block_stop" and parsed.index is not None:
            self._open.pop(parsed.index, None)

    def finish(self) -> bytes | None:
        """The message is whole when it has the reason why it ends, and its blocks have ended."""
        whole = self._stopped and not self._open
        return _event("message_stop", {"type": "message_stop"}) if whole else None

    def _right(self, parsed: TypedEvent, refusal: Refusal) -> bool:
        del parsed
        return refusal.original is not None

    def ending(self, error: Fault) -> bytes:
        stops = [_event("content_block_stop", {"type": "content_block_stop", "index": index}) for index in self._open]
        return b"".join(stops) + b"event: error\ndata: " + error.body(Dialect.ANTHROPIC) + b"\n\n"


class ResponsesScanner(TypedScanner):
    """OpenAI's Responses: events are numbered, output items are open between ``added`` and ``done``.

    A response that was begun ends as OpenAI's do, with ``error`` and then ``response.failed``. Items that are open are
    closed as ``incomplete``, with their text so far: text events are kept, and read some at a time.
    """

    __slots__ = ("_begun", "_last", "_open", "_parts", "_texts", "_unread")
    dialect = Dialect.RESPONSES

    def __init__(self) -> None:
        super().__init__()
        self._begun = b""
        self._last = b""
        self._open: dict[int, msgspec.Raw] = {}
        self._parts: dict[tuple[int, int], msgspec.Raw] = {}
        self._texts: dict[tuple[int, int], list[str]] = {}
        self._unread: list[bytes] = []

    def _look(self, event: bytes) -> bytes:
        if _NUMBER in event:
            self._last = event
        if event.startswith(_TEXT_EVENTS):
            self._unread.append(event)
            if len(self._unread) == _READ_AT_ONCE:
                self._read_texts()
            return event
        return super()._look(event)

    def _read_texts(self) -> None:
        for event in self._unread:
            try:
                parsed = _decode_text(data_of(event))
            except UNREADABLE:
                continue
            self._texts.setdefault((parsed.output_index, parsed.content_index), []).append(parsed.delta)
        self._unread.clear()

    def _note(self, parsed: TypedEvent, event: bytes) -> None:
        if parsed.type == "response.created":
            self._begun = event
        elif parsed.type == "response.output_item.added" and parsed.output_index is not None:
            self._open[parsed.output_index] = parsed.item.copy()
        elif parsed.type == "response.output_item.done" and parsed.output_index is not None:
            self._open.pop(parsed.output_index, None)
            self._read_texts()
            for kept in (self._parts, self._texts):
                for place in [place for place in kept if place[0] == parsed.output_index]:
                    del kept[place]
        elif parsed.type == "response.content_part.added" and parsed.output_index is not None:
            self._parts[parsed.output_index, parsed.content_index or 0] = parsed.part.copy()

    def _so_far(self, index: int, item: dict[str, object]) -> dict[str, object]:
        """Return an open item as it is closed."""
        texts = {place: "".join(parsed) for (of, place), parsed in self._texts.items() if of == index}
        item = item | {"status": "incomplete"}
        if item.get("type") == "function_call":
            return item | {"arguments": texts.get(0, "")}
        parts = {place: _object(raw) or {} for (of, place), raw in self._parts.items() if of == index}
        if item.get("type") == "message":
            parts = dict.fromkeys(texts, _EMPTY_TEXT) | parts
        if not parts:
            return item
        return item | {"content": [parts[place] | {"text": texts.get(place, "")} for place in sorted(parts)]}

    def _right(self, parsed: TypedEvent, refusal: Refusal) -> bool:
        """``response.failed`` ends a response whatever its words are."""
        if parsed.type == "error":
            return refusal.kind is not RefusalKind.CONTEXT or parsed.code == CONTEXT_CODE
        return parsed.type is not None

    def ending(self, error: Fault) -> bytes:
        self._read_texts()
        events: list[tuple[str, dict[str, object]]] = [
            ("response.output_item.done", {"output_index": index, "item": self._so_far(index, item)})
            for index, raw in sorted(self._open.items())
            if (item := _object(raw)) is not None
        ]
        why = {"code": error.reason, "message": error.message}
        events.append(("error", {**why, "param": error.param}))
        if (response := _response(self._begun)) is not None:
            failed = response | {"status": "failed", "error": why, "output": response.get("output") or []}
            events.append(("response.failed", {"response": failed}))
        before = _read(self._last)
        number = 0 if before is None or before.sequence_number is None else before.sequence_number + 1
        return b"".join(
            _event(kind, {"type": kind, "sequence_number": number + place, **fields})
            for place, (kind, fields) in enumerate(events)
        )


def _event(kind: str, parsed: dict[str, object]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(parsed) + b"\n\n"


class _Errored(msgspec.Struct, frozen=True):
    error: msgspec.Raw


class _Failed(msgspec.Struct, frozen=True):
    response: _Errored


def _error_in(parsed: TypedEvent, event: bytes) -> bytes:
    """Return the part of an event that is its error."""
    data = data_of(event)
    if parsed.type != "response.failed":
        return data
    try:
        return b'{"error":%b}' % bytes(msgspec.json.decode(data, type=_Failed).response.error)
    except UNREADABLE:
        return data


class _Begun(msgspec.Struct, frozen=True):
    response: dict[str, object]


def _response(event: bytes) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(data_of(event), type=_Begun).response if event else None
    except UNREADABLE:
        return None


def _object(raw: msgspec.Raw) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(raw, type=dict[str, object])
    except UNREADABLE:
        return None


def _joined(before: Usage, now: Usage) -> Usage:
    """Messages count the prompt at the start and the answer later: the larger counts hold."""
    return Usage(
        prompt_tokens=max(before.prompt_tokens, now.prompt_tokens),
        completion_tokens=max(before.completion_tokens, now.completion_tokens),
        cached_tokens=before.cached_tokens if now.cached_tokens is None else now.cached_tokens,
    )
