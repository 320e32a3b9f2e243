"""A scanner over a stream of server-sent events: bytes in, the same bytes out, event by event.

It watches for three things: the usage that the engine reports, an error event, and the final ``[DONE]``. Only events
that mention one of them are parsed. Bytes of an event are held back until it is complete, whatever the network's chunks
are, so that a client whose upstream dies never sees half an event.
"""

import re

import msgspec

from gateway.types import Dialect, Usage
from kvcontrol.core.errors import UNREADABLE

_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_USAGE = b'"usage"'
_NULL = (b": null", b":null")
_OBJECT = (b"data: {", b"data:{")
"""How an event begins that is none of ``[DONE]``: nearly all do."""
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_HELD_BYTES = 4 << 20
_MOST_TOKENS = 1 << 32


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    """OpenAI's field names, those of Responses and Messages, and those of LMDeploy's ``/generate``."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: int | None = None


class _Holder(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str | None = None
    usage: _Usage | None = None
    meta_info: _Usage | None = None
    response: _Holder | None = None
    message: _Holder | str | None = None
    choices: list[msgspec.Raw] | None = None
    error: msgspec.Raw = msgspec.Raw()

    def tokens(self) -> _Usage | None:
        """The usage, wherever this dialect puts it."""
        if self.usage is not None:
            return self.usage
        holder = self.response or (self.message if isinstance(self.message, _Holder) else None)
        return self.meta_info if holder is None else holder.usage


_decoder = msgspec.json.Decoder(_Event)
_any = msgspec.json.Decoder(msgspec.Raw)


class EventScanner:
    """One answer's scanner. With ``hide_usage`` the event that carries nothing but usage is left out: the gateway asked
    for it, the client didn't. ``torn`` says that a part of an event has been let pass, and not its end.
    """

    __slots__ = ("_held", "_hide_usage", "done", "failed", "torn", "usage")

    def __init__(self, *, hide_usage: bool) -> None:
        self._hide_usage = hide_usage
        self._held = b""
        self.torn = False
        self.usage: Usage | None = None
        self.done = False
        self.failed = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the events that ``data`` completes. O(len(data))."""
        before = len(self._held)
        held = self._held + data if before else data
        end = 0
        keep: list[bytes] = []
        for after in _ends(held, before):
            event = held[end:after]
            if self._look(event):
                keep.append(event)
            end = after
        self._held = held[end:]
        if len(self._held) > _MAX_HELD_BYTES:  # no event is that long: let it pass rather than hold it all
            keep.append(self._held)
            self._held = b""
            self.torn = True
        elif self.torn and end:
            self.torn = False
        return keep[0] if len(keep) == 1 else b"".join(keep)

    def rest(self) -> bytes:
        """Return what was held back, at the orderly end of the stream; ``is_whole`` says whether it is an event."""
        rest, self._held = self._held, b""
        return rest if not rest or self._look(rest) else b""

    def _look(self, event: bytes) -> bool:
        """Note what an event says; return whether the client is to have it."""
        last = event.rfind(_USAGE)  # within a text its quotes are escaped, so this is a field
        if last >= 0 and event.startswith(_NULL, last + len(_USAGE)) and event.find(_USAGE, 0, last) < 0:
            last = -1
        if last < 0 and b'"error"' not in event:
            if not event.startswith(_OBJECT) and b"[DONE]" in event and _data(event) == b"[DONE]":
                self.done = True
            return True
        try:
            said = _decoder.decode(_data(event))
        except UNREADABLE:
            return True
        if bytes(said.error) not in {b"", b"null"}:
            self.failed = True
        usage = said.tokens()
        if usage is None:
            return True
        self.usage = _usage(usage)
        return not (self._hide_usage and said.choices == [])


class GenerateScanner(EventScanner):
    """LMDeploy's ``/generate``: every event counts its tokens in ``meta_info``, and ``[DONE]`` ends it."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        super().__init__(hide_usage=False)
        self._last = b""

    def _look(self, event: bytes) -> bool:
        if b'"meta_info"' in event:
            self._last = event
            return True
        kept = super()._look(event)
        if self.done and self._last:
            self.usage = usage_of_answer(_data(self._last))
        return kept


class TypedScanner(EventScanner):
    """Responses and Messages: events have a type, one of which is the last; there is no ``[DONE]``."""

    __slots__ = ("_last", "_marks")

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(hide_usage=False)
        self._last, self._marks = _TYPED[dialect]

    def _look(self, event: bytes) -> bool:
        for mark in self._marks:
            if mark in event:
                break
        else:
            return True
        try:
            said = _decoder.decode(_data(event))
        except UNREADABLE:
            return True
        if said.type in {"error", "response.failed"}:
            self.failed = True
        self.done = self.done or said.type in self._last
        usage = said.tokens()
        if usage is not None:
            before = self.usage
            now = _usage(usage)
            self.usage = now if before is None else _joined(before, now)
        return True


_TYPED = {
    Dialect.RESPONSES: (
        frozenset({"response.completed", "response.incomplete", "response.failed"}),
        (b"response.completed", b"response.incomplete", b"response.failed", b'"error"'),
    ),
    Dialect.ANTHROPIC: (
        frozenset({"message_stop"}),
        (b"message_start", b"message_delta", b"message_stop", b'"error"'),
    ),
}


def scanner_for(dialect: Dialect, *, hide_usage: bool, generate: bool) -> EventScanner:
    """Return what watches a stream of this dialect; ``generate`` is LMDeploy's own."""
    if dialect in _TYPED:
        return TypedScanner(dialect)
    return GenerateScanner() if generate else EventScanner(hide_usage=hide_usage)


def is_whole(event: bytes) -> bool:
    """Whether an event that no blank line ended has all of its data."""
    data = _data(event)
    if data == b"[DONE]":
        return True
    try:
        _any.decode(data)
    except UNREADABLE:
        return False
    return True


def usage_of_answer(body: bytes) -> Usage | None:
    """Return the usage in a whole (not streamed) answer, where it has one."""
    try:
        said = _decoder.decode(body)
    except UNREADABLE:
        return None
    usage = said.tokens()
    return None if usage is None else _usage(usage)


def _ends(held: bytes, before: int) -> list[int]:
    """Return where events end of which the first ``before`` bytes hold no whole one.

    Most engines end lines with a newline alone, and to look for two of them takes a fifth of what the pattern does.
    """
    if b"\r" in held:
        return [match.end() for match in _BLANK_LINE.finditer(held, max(0, before - 3))]
    ends: list[int] = []
    at = held.find(b"\n\n", max(0, before - 1))
    while at >= 0:
        ends.append(at + 2)
        at = held.find(b"\n\n", at + 2)
    return ends


def _data(event: bytes) -> bytes:
    """The event's data lines, joined as the standard says."""
    lines = [line for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def _usage(said: _Usage) -> Usage:
    details = said.prompt_tokens_details or said.input_tokens_details
    cached = _sane(said.cache_read_input_tokens if details is None else details.cached_tokens)
    prompt_tokens = _sane(said.prompt_tokens or said.input_tokens) or 0
    if details is not None and cached is not None and cached > prompt_tokens:
        cached = None  # they are a part of the prompt's; Anthropic's own are beside them
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=_sane(said.completion_tokens or said.output_tokens) or 0,
        cached_tokens=cached,
    )


def _sane(tokens: int | None) -> int | None:
    """A number below zero, which would take away what a tenant has used, or beyond all reason is none."""
    return tokens if tokens is not None and 0 <= tokens <= _MOST_TOKENS else None


def _joined(before: Usage, now: Usage) -> Usage:
    """Messages count the prompt at the start and the answer later: the larger counts hold."""
    return Usage(
        prompt_tokens=max(before.prompt_tokens, now.prompt_tokens),
        completion_tokens=max(before.completion_tokens, now.completion_tokens),
        cached_tokens=before.cached_tokens if now.cached_tokens is None else now.cached_tokens,
    )


__all__ = ["EventScanner", "is_whole", "scanner_for", "usage_of_answer"]
