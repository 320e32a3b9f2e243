"""The parts of a request body that the gateway looks at; everything else passes through unseen.

A body is parsed once into these, and forwarded as the bytes that came. Types of fields that only the engine reads are
the engine's to check.
"""

import json
import re
from typing import Any

import msgspec

from gateway.errors import InvalidRequestError
from gateway.fingerprint.canonical import Prompt, TextPrompt, TokenPrompt, Unreadable, canonical_chat
from gateway.types import Operation

_LOOKED_AT = (b'"model"', b'"messages"', b'"prompt"', b'"input_ids"', b'"stream"', b'"stream_options"')
_INTERNAL = ("migration_request", "with_cache", "preserve_cache")
"""Fields of LMDeploy's disaggregated serving: they name other engines' memory, or keep blocks from being freed."""

_EXACT_CHECK_BYTES = 1 << 20
_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    migration_request: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    with_cache: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    preserve_cache: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def prompt_of(self) -> Prompt:
        """Return the prompt; raises ``InvalidRequestError`` for one that no engine can take."""
        raise NotImplementedError


class Message(msgspec.Struct, frozen=True):
    """Only what must hold of every message; the template gets the message as it came."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(_Body, frozen=True, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    n: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    input_ids: list[int] | None = None

    def prompt_of(self) -> Prompt:
        if self.input_ids is not None:
            _check_tokens(self.input_ids, "input_ids")
        if not self.messages and self.input_ids is not None:
            return TokenPrompt(token_ids=tuple(self.input_ids))
        if not self.messages:
            raise InvalidRequestError("messages: is empty; at least one message is needed", param="messages")
        return canonical_chat(
            self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            template_kwargs=self.chat_template_kwargs,
            enable_thinking=self.enable_thinking,
            reasoning_effort=self.reasoning_effort,
        )


class CompletionBody(_Body, frozen=True, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[Any]

    def prompt_of(self) -> Prompt:
        match self.prompt:
            case str(text):
                _check_text(text, "prompt")
                return TextPrompt(text=text)
            case []:
                raise _empty("prompt")
            case [str(), *_] as texts:
                for number, each in enumerate(texts):
                    _check_text(each, f"prompt[{number}]")
                return TextPrompt(text=texts[0]) if len(texts) == 1 else Unreadable(reason="several_prompts")
            case [list(), *_] as lists:
                for number, each in enumerate(lists):
                    _check_tokens(each, f"prompt[{number}]")
                return (
                    TokenPrompt(token_ids=tuple(lists[0])) if len(lists) == 1 else Unreadable(reason="several_prompts")
                )
            case ids:
                _check_tokens(ids, "prompt")
                return TokenPrompt(token_ids=tuple(ids))


def _check_text(text: object, where: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}: expected a text like those before it", param=where)
    if not text:
        raise _empty(where)


def _check_tokens(ids: object, where: str) -> None:
    """Engines take a negative or broken token id for granted and fall over it."""
    if not isinstance(ids, list):
        raise InvalidRequestError(f"{where}: expected a list of token ids like those before it", param=where)
    if not ids:
        raise _empty(where)
    if all(type(token) is int for token in ids) and min(ids) >= 0:
        return
    number, token = next((number, token) for number, token in enumerate(ids) if type(token) is not int or token < 0)
    shown = token if type(token) in {int, float, bool} else f"a {type(token).__name__}"
    raise InvalidRequestError(
        f"{where}[{number}]: is {shown}; a token id is an integer, at least 0", param=f"{where}[{number}]"
    )


def _empty(where: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: is empty; a prompt has at least one token", param=where)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request as far as the gateway is concerned. ``body`` is what the engine is sent; ``hide_usage`` says that it
    asks for usage in the stream which the client did not ask for.
    """

    operation: Operation
    model: str
    prompt: Prompt
    body: bytes
    stream: bool
    hide_usage: bool


_DECODERS: dict[Operation, msgspec.json.Decoder[Any]] = {
    Operation.CHAT: msgspec.json.Decoder(ChatBody),
    Operation.COMPLETIONS: msgspec.json.Decoder(CompletionBody),
}


def parse_call(operation: Operation, body: bytes) -> Call:
    """Look at a body; raises ``InvalidRequestError`` that names the field."""
    try:
        said: ChatBody | CompletionBody = _DECODERS[operation].decode(body)
        if isinstance(said, ChatBody):
            for number, message in enumerate(said.messages):
                _check_message(message, number)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except UnicodeDecodeError:  # its position counts from the start of one string, not of the body
        raise InvalidRequestError("the request body is not JSON: it is not valid UTF-8", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the request body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("the request body is nested too deeply", code="invalid_json") from None
    _refuse_duplicates(body)
    for name in _INTERNAL:
        if getattr(said, name) is not msgspec.UNSET:
            raise InvalidRequestError(f"{name}: is for engines among themselves, not for clients", param=name)
    stream = bool(said.stream)
    asked = isinstance(said.stream_options, StreamOptions) and bool(said.stream_options.include_usage)
    inject = stream and not asked
    return Call(
        operation=operation,
        model=said.model,
        prompt=said.prompt_of(),
        body=_with_usage(body, said) if inject else body,
        stream=stream,
        hide_usage=inject,
    )


def _check_message(message: dict[str, Any], number: int) -> None:
    try:
        msgspec.convert(message, Message)
    except msgspec.ValidationError as error:
        raise _invalid(error, where=f"messages[{number}]") from None


def _invalid(error: msgspec.ValidationError, where: str = "") -> InvalidRequestError:
    """Msgspec says ``Expected `str`, got `int` - at `$.model```: the path becomes ``param``."""
    text = str(error)
    match = _PATH.search(text)
    path = match.group(1) if match else ""
    missing = re.search(r"missing required field `(\w+)`", text)
    param = ".".join(part for part in (where, path, missing.group(1) if missing else "") if part) or None
    reason = text[: match.start()] if match else text
    reason = reason[:1].lower() + reason[1:]
    return InvalidRequestError(f"{param}: {reason}" if param else f"the request body: {reason}", param=param)


def _refuse_duplicates(body: bytes) -> None:
    """A key given twice is read differently by different parsers: what was checked must be what the engine reads.

    The usual body is cleared by five substring counts. A suspicious one (tools often have a property "model") is
    written anew from its parsed keys: only with a key twice, or escaped, does its length change.
    """
    if all(body.count(key) <= 1 for key in _LOOKED_AT) and not _ESCAPED_ASCII.search(body):
        return
    dense = msgspec.json.format(body, indent=-1)
    if len(msgspec.json.encode(msgspec.json.decode(dense, type=dict[str, msgspec.Raw]))) == len(dense):
        return
    if len(body) > _EXACT_CHECK_BYTES:
        raise InvalidRequestError("a field is given more than once, or its name is written with escapes")
    twice = _given_twice(body)
    if twice is not None:
        raise InvalidRequestError(f"{twice}: is given more than once", param=twice)


def _given_twice(body: bytes) -> str | None:
    objects: list[list[str]] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        objects.append([key for key, _ in pairs])

    try:
        json.loads(body, object_pairs_hook=note)
    except RecursionError:
        raise InvalidRequestError("the request body is nested too deeply", code="invalid_json") from None
    keys = objects[-1]  # the outermost object is closed last
    return next((key for key in keys if keys.count(key) > 1), None)


def _with_usage(body: bytes, said: ChatBody | CompletionBody) -> bytes:
    """The same body, asking for usage in the stream; all other bytes stay as they came."""
    if said.stream_options is msgspec.UNSET:
        start = body.index(b"{") + 1
        return body[:start] + b'"stream_options":{"include_usage":true},' + body[start:]
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    options = msgspec.json.decode(fields["stream_options"], type=dict[str, msgspec.Raw] | None) or {}
    options["include_usage"] = msgspec.Raw(b"true")
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)


__all__ = ["Call", "ChatBody", "CompletionBody", "parse_call"]
