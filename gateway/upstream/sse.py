"""A scanner over a stream of server-sent events: bytes in, the same bytes out, event by event.

It watches for three things: the usage that the engine reports, an error event, and the final ``[DONE]``. Only events
that mention one of them are parsed. Bytes of an event are held back until it is complete, whatever the network's chunks
are, so that a client whose upstream dies never sees half an event.
"""

import re

import msgspec

from gateway.types import Usage

_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_HELD_BYTES = 4 << 20


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct, frozen=True):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] | None = None
    error: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Event)


class EventScanner:
    """One answer's scanner. With ``hide_usage`` the event that carries nothing but usage is left out: the gateway asked
    for it, the client didn't.
    """

    __slots__ = ("_held", "_hide_usage", "done", "failed", "usage")

    def __init__(self, *, hide_usage: bool) -> None:
        self._hide_usage = hide_usage
        self._held = b""
        self.usage: Usage | None = None
        self.done = False
        self.failed = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the events that ``data`` completes. O(len(data))."""
        held = self._held + data if self._held else data
        end = 0
        start = 0
        keep: list[bytes] = []
        for match in _BLANK_LINE.finditer(held, max(0, len(self._held) - 3)):
            end = match.end()
            event = held[start:end]
            if self._look(event):
                keep.append(event)
            start = end
        self._held = held[end:]
        if len(self._held) > _MAX_HELD_BYTES:  # no event is that long: let it pass rather than hold it all
            keep.append(self._held)
            self._held = b""
        return keep[0] if len(keep) == 1 else b"".join(keep)

    def rest(self) -> bytes:
        """Return what was held back, at the orderly end of the stream."""
        rest, self._held = self._held, b""
        return rest if not rest or self._look(rest) else b""

    def _look(self, event: bytes) -> bool:
        """Note what an event says; return whether the client is to have it."""
        usages = event.count(b'"usage"')  # within a text its quotes are escaped, so this is a field
        if usages == 1 and (b'"usage": null' in event or b'"usage":null' in event):
            usages = 0
        if not usages and b'"error"' not in event:
            if b"[DONE]" in event and _data(event) == b"[DONE]":
                self.done = True
            return True
        try:
            said = _decoder.decode(_data(event))
        except (msgspec.DecodeError, RecursionError):
            return True
        if bytes(said.error) not in {b"", b"null"}:
            self.failed = True
        if said.usage is None:
            return True
        self.usage = _usage(said.usage)
        return not (self._hide_usage and said.choices == [])


def usage_of_answer(body: bytes) -> Usage | None:
    """Return the usage in a whole (not streamed) answer, where it has one."""
    try:
        said = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if said.usage is None else _usage(said.usage)


def error_event(envelope: bytes) -> bytes:
    """Return an error envelope as the event that ends a stream which can't go on."""
    return b"data: " + envelope + b"\n\n"


def _data(event: bytes) -> bytes:
    """The event's data lines, joined as the standard says."""
    lines = [line for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)


def _usage(said: _Usage) -> Usage:
    details = said.prompt_tokens_details
    return Usage(
        prompt_tokens=said.prompt_tokens,
        completion_tokens=said.completion_tokens or 0,
        cached_tokens=None if details is None else details.cached_tokens,
    )


__all__ = ["EventScanner", "error_event", "usage_of_answer"]
