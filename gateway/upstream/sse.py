"""A scanner over a stream of server-sent events: bytes in, the same bytes out, event by event.

It watches for three things: the usage that the engine reports, an error event, and the final ``[DONE]``. Only events
that mention one of them are parsed; an engine's error of another shape than OpenAI's is re-wrapped. Bytes of an event
are held back until it is complete, whatever the network's chunks are, so that a client whose upstream dies never sees
half an event.
"""

import re
from typing import Protocol

from gateway.types import Dialect, Usage
from gateway.upstream.refusal import refusal_of_event
from gateway.upstream.usage import has_finished, is_json, parse_chunk, usage_of_answer

_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_USAGE = b'"usage"'
_NULL = (b": null", b":null")
_OBJECT = (b"data: {", b"data:{")
"""How an event begins that is none of ``[DONE]``: nearly all do."""
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_HELD_BYTES = 4 << 20
_DONE = b"data: [DONE]\n\n"


class Fault(Protocol):
    """Why a stream can't go on: an ``ApiError`` or a ``Refusal``."""

    @property
    def message(self) -> str: ...

    @property
    def param(self) -> str | None: ...

    @property
    def reason(self) -> str: ...

    def body(self, dialect: Dialect = ..., /) -> bytes: ...


class EventScanner:
    """One answer's scanner. With ``hide_usage`` the event that carries nothing but usage is left out: the gateway asked
    for it, the client didn't. ``answers`` is how many choices were asked for. ``failed`` says that the engine sent an
    error, ``refused`` that it is the request's own fault, ``torn`` that a part of an event has been let pass, and not
    its end.
    """

    __slots__ = ("_answers", "_held", "_hide_usage", "_latest", "done", "failed", "refused", "torn", "usage")

    def __init__(self, *, hide_usage: bool, answers: int = 1) -> None:
        self._hide_usage = hide_usage
        self._answers = answers
        self._held = b""
        self._latest = b""  # the last event with choices
        self.torn = False
        self.usage: Usage | None = None
        self.done = False
        self.failed = False
        self.refused = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the events that ``data`` completes. O(len(data))."""
        before = len(self._held)
        held = self._held + data if before else data
        end = 0
        keep: list[bytes] = []
        for after in _ends(held, before):
            event = held[end:after]
            if passed := self._look(event):
                keep.append(passed)
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
        return self._look(rest) if is_whole(rest) else rest

    def ending(self, error: Fault) -> bytes:
        """Return the events that end a stream which can't go on: they continue what has been passed on of it."""
        return b"data: " + error.body() + b"\n\n" + _DONE

    def after_error(self) -> bytes:
        """Return what still has to follow an engine's own error event, for the stream to be over."""
        return _DONE

    def finish(self) -> bytes | None:
        """Return the last event of a stream that its engine ended without it, None where more than that is missing.

        An answer is whole when its last chunk has a reason why it ends. Of several answers nobody knows which have
        ended.
        """
        return _DONE if self._answers == 1 and has_finished(data_of(self._latest)) else None

    def _look(self, event: bytes) -> bytes:
        """Note what an event says; return what the client is to have of it: all, nothing, or an error re-wrapped."""
        last = event.rfind(_USAGE)  # within a text its quotes are escaped, so this is a field
        if last >= 0 and event.startswith(_NULL, last + len(_USAGE)) and event.find(_USAGE, 0, last) < 0:
            last = -1
        if last < 0 and b'"error"' not in event:
            if not event.startswith(_OBJECT) and b"[DONE]" in event and data_of(event) == b"[DONE]":
                self.done = True
            self._latest = event
            return event
        data = data_of(event)
        parsed = parse_chunk(data)
        if parsed is None:
            return event
        if parsed.is_error:
            return self._failure(event, data)
        if parsed.choices:
            self._latest = event
        usage = parsed.tokens()
        if usage is None:
            return event
        self.usage = usage
        return b"" if self._hide_usage and parsed.choices == [] else event

    def _failure(self, event: bytes, data: bytes) -> bytes:
        """Return an engine's error as its client is to have it."""
        self.failed = True
        refusal = refusal_of_event(data)
        if refusal is None:
            return event
        self.refused = refusal.of_the_request
        if refusal.original is not None:
            return event
        return b"data: " + refusal.body() + event[len(event.rstrip(b"\r\n")) :]


class GenerateScanner(EventScanner):
    """LMDeploy's ``/generate``: every event counts its tokens in ``meta_info``, and ``[DONE]`` ends it."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        super().__init__(hide_usage=False)
        self._last = b""

    def _look(self, event: bytes) -> bytes:
        if b'"meta_info"' in event:
            self._last = event
            return event
        kept = super()._look(event)
        if self.done and self._last:
            self.usage = usage_of_answer(data_of(self._last))
        return kept

    def finish(self) -> bytes | None:
        last = data_of(self._last)
        if not has_finished(last):
            return None
        self.usage = usage_of_answer(last)
        return _DONE


def is_whole(event: bytes) -> bool:
    """Whether an event that no blank line ended has all of its data."""
    data = data_of(event)
    return data == b"[DONE]" or is_json(data)


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


def data_of(event: bytes) -> bytes:
    """The event's data lines, joined as the standard says."""
    lines = [line for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
