"""From a request's body to a ``Call``: parsed once, looked at, and forwarded as the bytes that came."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from gateway.errors import InvalidRequestError
from gateway.fingerprint.canonical import Prompt
from gateway.requests.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    CountBody,
    EmbeddingsBody,
    GenerateBody,
    Message,
    OtherBody,
    RerankBody,
    StreamOptions,
)
from gateway.requests.messages import MessagesBody
from gateway.requests.responses import ResponsesBody
from gateway.requests.shape import check_shape
from gateway.types import Operation

_INTERNAL = ("migration_request", "with_cache", "preserve_cache")
"""Fields of LMDeploy's disaggregated serving: they name other engines' memory, or keep blocks from being freed."""

_SESSION = "session_id"
"""LMDeploy's name for a running request, one for all clients of an engine: what one says, another may say, too."""

_EXACT_CHECK_BYTES = 1 << 20
_MOST_FOLLOWED = 256
_SPACE = re.compile(rb"[ \t\r\n]*")
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


class Call(NamedTuple):
    """A request as far as the gateway is concerned. ``body`` is what the engine is sent; ``hide_usage`` says that it
    asks for usage in the stream which the client did not ask for, ``streams_logprobs`` that it is a streamed completion
    with log probabilities.
    """

    operation: Operation
    model: str
    prompt: Prompt
    body: bytes
    stream: bool
    hide_usage: bool
    answer_tokens: int | None
    prompts: int
    answers: int
    streams_logprobs: bool = False


_DECODERS: dict[Operation, msgspec.json.Decoder[Any]] = {
    Operation.CHAT: msgspec.json.Decoder(ChatBody),
    Operation.COMPLETIONS: msgspec.json.Decoder(CompletionBody),
    Operation.EMBEDDINGS: msgspec.json.Decoder(EmbeddingsBody),
    Operation.RERANK: msgspec.json.Decoder(RerankBody),
    Operation.RESPONSES: msgspec.json.Decoder(ResponsesBody),
    Operation.MESSAGES: msgspec.json.Decoder(MessagesBody),
    Operation.COUNT_TOKENS: msgspec.json.Decoder(CountBody),
    Operation.GENERATE: msgspec.json.Decoder(GenerateBody),
    Operation.TOKENIZE: msgspec.json.Decoder(OtherBody),
    Operation.DETOKENIZE: msgspec.json.Decoder(OtherBody),
}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MODEL_OPTIONAL = frozenset({Operation.GENERATE, Operation.TOKENIZE, Operation.DETOKENIZE})


def parse_call(
    operation: Operation, body: bytes, *, models: Callable[[], list[str]] = list, most_answers: int = 128
) -> Call:
    """Look at a body; raises ``InvalidRequestError`` that names the field.

    ``models`` are those served now: where a route's own API has no model and only one is served, it is that one, and
    "" while none is. ``most_answers`` bounds the sequences that an engine runs for one request.
    """
    try:
        return _parsed(operation, body, models, most_answers)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except UnicodeDecodeError:  # its position counts from the start of one string, not of the body
        raise InvalidRequestError("the request body is not JSON: it is not valid UTF-8", code="invalid_json") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the request body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("the request body is nested too deeply", code="invalid_json") from None


def _parsed(operation: Operation, body: bytes, models: Callable[[], list[str]], most_answers: int) -> Call:
    """``parse_call``, but for what msgspec raises: any step that follows a body inwards may find it too deep."""
    check_shape(body)
    parsed: Body = _DECODERS[operation].decode(body)
    if isinstance(parsed, ChatBody):
        for number, message in enumerate(parsed.messages):
            _check_message(message, number)
    parsed.check_fan_out(most_answers)
    model = parsed.model or _only_model(operation, models)
    _refuse_duplicates(body)
    for name in _INTERNAL:
        if getattr(parsed, name) is not msgspec.UNSET:
            raise InvalidRequestError(f"{name}: is for engines among themselves, not for clients", param=name)
    if parsed.session_id is not msgspec.UNSET:
        body = _without(body, _SESSION)
    stream = bool(parsed.stream)
    wants_usage = isinstance(parsed.stream_options, StreamOptions) and bool(parsed.stream_options.include_usage)
    inject = stream and parsed.counts_usage and not wants_usage
    return Call(
        operation=operation,
        model=model,
        prompt=parsed.prompt_of(),
        body=_with_usage(body, parsed) if inject else body,
        stream=stream,
        hide_usage=inject,
        answer_tokens=parsed.answer_tokens,
        prompts=parsed.prompts,
        answers=parsed.answers,
        streams_logprobs=stream and parsed.asks_logprobs,
    )


def _only_model(operation: Operation, models: Callable[[], list[str]]) -> str:
    if operation not in _MODEL_OPTIONAL:
        raise InvalidRequestError("model: object missing required field `model`", param="model")
    served = models()
    if len(served) > 1:
        raise InvalidRequestError(
            f"model: is required, as several models are served: {', '.join(served)}", param="model"
        )
    return served[0] if served else ""


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
    """A field given twice is read differently by different parsers: what was checked must be what the engine reads.

    A usual body is cleared by holding it to its fields as they were read: those that are written twice are not the same
    text. One whose fields' names are escaped is written anew from them: only with one twice does its length change.
    """
    if _is_as_read(body):
        return
    dense = msgspec.json.format(body, indent=-1)
    if len(msgspec.json.encode(msgspec.json.decode(dense, type=dict[str, msgspec.Raw]))) == len(dense):
        return
    if len(body) > _EXACT_CHECK_BYTES:
        raise InvalidRequestError("a field is given more than once, or its name is written with escapes")
    twice = _given_twice(body)
    if twice is not None:
        raise InvalidRequestError(f"{twice}: is given more than once", param=twice)


def _is_as_read(body: bytes) -> bool:
    """Whether an object's text is that of the fields that it was read as, one after the other, and nothing else."""
    try:
        fields = {key.encode(): bytes(value) for key, value in _fields.decode(body).items()}
    except UnicodeError:  # half a surrogate pair
        return False
    # Two quotes, a colon and a comma for each: with a field twice or a byte between them it is longer.
    if len(body) == 1 + 4 * len(fields) + sum(map(len, fields)) + sum(map(len, fields.values())):
        return True
    if len(fields) > _MOST_FOLLOWED:  # to write them anew takes less than to follow them
        return False
    place = _space(body, 0) + 1
    for number, (key, value) in enumerate(fields.items(), 1):
        for part in (b'"%b"' % key, b":", value, b"," if number < len(fields) else b"}"):
            place = _space(body, place)
            if not body.startswith(part, place):
                return False
            place += len(part)
    return _space(body, place) == len(body)


def _space(body: bytes, place: int) -> int:
    """Return where a text goes on behind the space at a place."""
    found = _SPACE.match(body, place)
    return place if found is None else found.end()


def _given_twice(body: bytes) -> str | None:
    """Return the first field that an object's text has twice, None where each is there once. O(len(body))."""
    fields: list[tuple[str, Any]] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        nonlocal fields
        fields = pairs  # the outermost object is closed last; those within it are let go at once

    json.loads(body, object_pairs_hook=note, parse_int=str)  # Python makes no number of more than 4,300 digits
    seen: set[str] = set()
    for key, _ in fields:
        if key in seen:
            return key
        seen.add(key)
    return None


def _with_usage(body: bytes, parsed: Body) -> bytes:
    """The same body, asking for usage in the stream; all other bytes stay as they came."""
    if parsed.stream_options is msgspec.UNSET:
        start = body.index(b"{") + 1
        return body[:start] + b'"stream_options":{"include_usage":true},' + body[start:]
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    options = msgspec.json.decode(fields["stream_options"], type=dict[str, msgspec.Raw] | None) or {}
    options["include_usage"] = msgspec.Raw(b"true")
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields)


def _without(body: bytes, name: str) -> bytes:
    """The same body without a field; the others' values stay as they came."""
    fields = _fields.decode(body)
    del fields[name]
    return msgspec.json.encode(fields)
