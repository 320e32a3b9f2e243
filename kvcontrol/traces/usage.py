"""What an answer's ``usage`` and headers say of tokens, taken only if it can be true: a target may say anything."""

from collections.abc import Mapping
from typing import Final, NamedTuple

_MOST_TOKENS: Final = 1 << 32
_MOST_DIGITS: Final = 10


class UsageError(ValueError):
    """A usage can't be true; the message names the field and what is allowed, not the value."""


class Used(NamedTuple):
    """How many tokens a prompt and its answer had, and how many of the prompt's were cached."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def used(value: object) -> Used:
    """Return what a usage says, 0 for what it leaves out; raises ``UsageError``."""
    if not isinstance(value, Mapping):
        raise UsageError("usage is no object")
    details = value.get("prompt_tokens_details")
    if not isinstance(details, Mapping | None):
        raise UsageError("prompt_tokens_details is no object")
    prompt_tokens = _tokens(value, "prompt_tokens")
    cached_tokens = 0 if details is None else _tokens(details, "cached_tokens")
    if cached_tokens > prompt_tokens:
        raise UsageError("cached_tokens is more than prompt_tokens")
    return Used(prompt_tokens, _tokens(value, "completion_tokens"), cached_tokens)


def header_tokens(text: str) -> int:
    """Return how many tokens a header of an answer says; 0 where that is no number of tokens."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else 0


def _tokens(value: Mapping[str, object], name: str) -> int:
    tokens = value.get(name)
    if tokens is None:
        return 0
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= _MOST_TOKENS:
        raise UsageError(f"{name} is no number of tokens, 0 to {_MOST_TOKENS}")
    return tokens
