"""Parses the token usage, and errors, in an answer or stream event.

The field names are OpenAI's, those of Responses and Messages, and those of LMDeploy's ``/generate``. Impossible
numbers are ignored.
"""

import msgspec

from gateway.types import Usage
from kvcontrol.core.errors import UNREADABLE

_MOST_TOKENS = 1 << 32


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: int | None = None


class _Holder(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class ParsedChunk(msgspec.Struct, frozen=True):
    """One answer or event, as far as anybody looks."""

    type: str | None = None
    usage: _Usage | None = None
    meta_info: _Usage | None = None
    response: _Holder | None = None
    message: _Holder | str | None = None
    choices: list[msgspec.Raw] | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def is_error(self) -> bool:
        return bytes(self.error) not in {b"", b"null"}

    def tokens(self) -> Usage | None:
        """Return its usage, wherever its dialect puts it."""
        reported = self.usage
        if reported is None:
            holder = self.response or (self.message if isinstance(self.message, _Holder) else None)
            reported = self.meta_info if holder is None else holder.usage
        return None if reported is None else _usage(reported)


_decode = msgspec.json.Decoder(ParsedChunk).decode
_decode_any = msgspec.json.Decoder(msgspec.Raw).decode


def parse_chunk(data: bytes) -> ParsedChunk | None:
    """Return what a JSON text says, None where it can't be read."""
    try:
        return _decode(data)
    except UNREADABLE:
        return None


class _Finish(msgspec.Struct, frozen=True):
    finish_reason: msgspec.Raw = msgspec.Raw()

    @property
    def reported(self) -> bool:
        return bytes(self.finish_reason) not in {b"", b"null"}


class _Ended(msgspec.Struct, frozen=True):
    choices: list[_Finish] | None = None
    meta_info: _Finish | None = None


_decode_ended = msgspec.json.Decoder(_Ended).decode


def has_finished(data: bytes) -> bool:
    """Whether an event gives the reason why an answer ends."""
    try:
        reported = _decode_ended(data)
    except UNREADABLE:
        return False
    found = reported.choices or ([] if reported.meta_info is None else [reported.meta_info])
    return bool(found) and all(each.reported for each in found)


def is_json(data: bytes) -> bool:
    """Whether it is one whole JSON text."""
    try:
        _decode_any(data)
    except UNREADABLE:
        return False
    return True


def usage_of_answer(body: bytes) -> Usage | None:
    """Return the usage in a whole (not streamed) answer, where it has one."""
    reported = parse_chunk(body)
    return None if reported is None else reported.tokens()


def _usage(reported: _Usage) -> Usage:
    details = reported.prompt_tokens_details or reported.input_tokens_details
    cached = _sane(reported.cache_read_input_tokens if details is None else details.cached_tokens)
    prompt_tokens = _sane(reported.prompt_tokens or reported.input_tokens) or 0
    if details is not None and cached is not None and cached > prompt_tokens:
        cached = None  # they are a part of the prompt's; Anthropic's own are beside them
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=_sane(reported.completion_tokens or reported.output_tokens) or 0,
        cached_tokens=cached,
    )


def _sane(tokens: int | None) -> int | None:
    """A number below zero, which would take away what a tenant has used, or beyond all reason is none."""
    return tokens if tokens is not None and 0 <= tokens <= _MOST_TOKENS else None
