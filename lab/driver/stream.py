"""A streamed answer's server-sent events, of chats and completions: cut into lines, decoded, checked for failures."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

FAILED: Final = frozenset({"error", "abort"})
"""Finish reasons that LMDeploy alone gives, where its engine failed."""


class Delta(msgspec.Struct):
    """A part of a chat's answer."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """One answer of an event: a ``delta`` of a chat, a text of a completion, or its end."""

    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        delta = self.delta
        return "" if delta is None else delta.content or delta.reasoning_content or ""


class StreamEvent(msgspec.Struct):
    """One event. Its shape alone reports a failure, an ``error`` or a finish reason: a text may contain any word."""

    choices: list[Choice] | None = None
    usage: Any = None
    error: Any = None

    @property
    def failed_with(self) -> str:
        """The finish reason that reports a failed engine, or nothing."""
        return next((each.finish_reason for each in self.choices or () if each.finish_reason in FAILED), "") or ""


class StreamReader:
    """Reads one stream; ``done`` once its end was announced. Raises ``UNREADABLE`` for what is no event."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def events(self, received: bytes) -> Iterator[StreamEvent]:
        """Yield the events that these bytes complete."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.done = True
                else:
                    yield _decode(data)


_decode = msgspec.json.Decoder(StreamEvent).decode
