"""An engine's error, classified once, and converted to the form of each API.

Engines answer in many shapes: OpenAI's and Anthropic's envelopes, LMDeploy's with the fields on top level, FastAPI's
``detail``, plain text. One that is right already, and has the code that clients know, stays byte for byte.
"""

import re
from enum import StrEnum
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from gateway.errors.context_length import CODE as CONTEXT_CODE
from gateway.errors.context_length import ContextLength, context_length_in
from gateway.errors.envelopes import ANTHROPIC_TYPES, anthropic_envelope, anthropic_type, envelope
from gateway.types import Dialect, Operation
from kvcontrol.core.errors import UNREADABLE

_MAX_FOREIGN_CHARS = 2000
_BEYOND_STATUSES = 600
_BUSY = frozenset({429, 503, 529})
_CONTEXT_CODES = frozenset({CONTEXT_CODE, "exceed_context_size_error"})
_CLIENT_ERRORS = frozenset(
    {
        "invalid_request_error",
        "badrequesterror",
        "validationerror",
        "requestvalidationerror",
        "invalid_request",
        "invalid_prompt",
        "unsupported_feature",
        "preprocess_failed",
    }
)
"""Types and codes, in lower case, by which engines say that a request is wrong."""
_UNSUPPORTED = re.compile(
    r"not supported|unsupported|not enabled|n't support|not support|not implemented", re.IGNORECASE
)
_KINDS = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    422: ("invalid_request_error", "invalid_request"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("service_unavailable_error", "engine_unavailable"),
    529: ("service_unavailable_error", "engine_unavailable"),
}


_OPTIONAL = frozenset({Operation.EMBEDDINGS, Operation.RERANK})
"""What only engines of some models serve."""


class RefusalKind(StrEnum):
    """Why an engine refuses a request, where that can be told. The first three are the request's own fault."""

    CONTEXT = "context"
    UNSUPPORTED = "unsupported"
    SCHEMA = "schema"
    OVERLOAD = "overload"
    AUTH = "auth"


_OF_THE_REQUEST = frozenset({RefusalKind.CONTEXT, RefusalKind.UNSUPPORTED, RefusalKind.SCHEMA})


class _ErrorText(NamedTuple):
    """What a foreign answer says."""

    message: str
    kind: str | None = None
    param: str | None = None
    code: str | None = None


class Refusal(NamedTuple):
    """An engine's error. ``message``, ``param`` and ``reason`` are as for an ``ApiError``.

    ``original`` is the engine's body, if it already has the form of its dialect.
    """

    status: int
    kind: RefusalKind | None
    message: str
    type: str
    param: str | None
    reason: str
    context: ContextLength
    original: bytes | None = None

    @property
    def of_the_request(self) -> bool:
        """Whether it is the request's own fault, and says nothing against the instance."""
        return self.kind in _OF_THE_REQUEST

    def body(self, dialect: Dialect = Dialect.OPENAI) -> bytes:
        """Return it in the envelope of a dialect."""
        if self.original is not None:
            return self.original
        if dialect is Dialect.ANTHROPIC:
            return anthropic_envelope(self.status, self.message)
        return envelope(self.message, kind=self.type, param=self.param, code=self.reason)


def refusal_of_answer(status: int, body: bytes, dialect: Dialect = Dialect.OPENAI) -> Refusal:
    """Return what an engine said with an error status. A request's own fault is never a 5xx to its client."""
    payload = _decoded(body)
    return _refusal(status, payload, dialect, body, is_event=False)


def refusal_without_route(refusal: Refusal, operation: Operation, instance: str) -> Refusal:
    """Return what a client gets where an engine answered that it has no such route: a 400 that names the instance.

    A 404 for an unknown model, and any other refusal, stays as it is.
    """
    unknown = refusal.status == HTTPStatus.NOT_FOUND and "model" not in refusal.message.lower()
    if operation not in _OPTIONAL or not (unknown or refusal.status == HTTPStatus.METHOD_NOT_ALLOWED):
        return refusal
    return Refusal(
        status=HTTPStatus.BAD_REQUEST,
        kind=RefusalKind.UNSUPPORTED,
        message=f"instance {instance} has no route for {operation}: its engine does not serve this operation",
        type="invalid_request_error",
        param=None,
        reason="unsupported_route",
        context=ContextLength(),
    )


def refusal_of_event(data: bytes, dialect: Dialect = Dialect.OPENAI) -> Refusal | None:
    """Return the error that an engine put into a stream; None for what can't be read.

    LMDeploy's own has a number for a ``code``, which is the status that it would have answered with.
    """
    try:
        payload: Any = msgspec.json.decode(data)
    except UNREADABLE:
        return None
    match payload:
        case {"error": {"code": int(status)}} if HTTPStatus.BAD_REQUEST <= status < _BEYOND_STATUSES:
            return _refusal(status, payload, dialect, data, is_event=True)
    return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, payload, dialect, data, is_event=True)


def _refusal(status: int, payload: Any, dialect: Dialect, body: bytes, *, is_event: bool) -> Refusal:
    read = _read(payload) or _ErrorText(f"the engine answered with status {status} and no message")
    context = None if status in _BUSY else context_length_in(read.message)
    if context is None and read.code in _CONTEXT_CODES:
        context = ContextLength()
    kind = _kind(status, read, context)
    if kind in _OF_THE_REQUEST and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        status = HTTPStatus.BAD_REQUEST
    types = ANTHROPIC_TYPES if is_event else frozenset({anthropic_type(status)})
    right = body if _right(payload, dialect, types) else None
    if context is not None:
        return _too_long(status, read, context, dialect, right)
    usual, code = _of_status(status)
    if kind is RefusalKind.UNSUPPORTED:
        code = "unsupported_parameter"
    return Refusal(
        status=status,
        kind=kind,
        message=read.message,
        type=read.kind or usual,
        param=read.param,
        reason=read.code or code,
        context=ContextLength(),
        original=right,
    )


def _too_long(status: int, read: _ErrorText, context: ContextLength, dialect: Dialect, right: bytes | None) -> Refusal:
    """What clients know by a code, or by a phrase."""
    if dialect is Dialect.ANTHROPIC:
        message = context.for_anthropic(read.message)
        known = message == read.message
    else:
        message = context.for_openai(read.message)
        known = read.code == CONTEXT_CODE
    return Refusal(
        status=status,
        kind=RefusalKind.CONTEXT,
        message=message,
        type="invalid_request_error",
        param=read.param,
        reason=CONTEXT_CODE,
        context=context,
        original=right if known else None,
    )


def _kind(status: int, read: _ErrorText, context: ContextLength | None) -> RefusalKind | None:
    """A 500 is the request's fault only where the engine says so itself: a failing device is "not supported", too."""
    if context is not None:
        return RefusalKind.CONTEXT
    if status in _BUSY:
        return RefusalKind.OVERLOAD
    if status in {401, 403}:
        return RefusalKind.AUTH
    mistake = status < HTTPStatus.INTERNAL_SERVER_ERROR or any(
        word is not None and word.lower() in _CLIENT_ERRORS for word in (read.kind, read.code)
    )
    if status == HTTPStatus.NOT_IMPLEMENTED or (mistake and _UNSUPPORTED.search(read.message[:_MAX_FOREIGN_CHARS])):
        return RefusalKind.UNSUPPORTED
    if mistake and (status in {400, 422} or status >= HTTPStatus.INTERNAL_SERVER_ERROR):
        return RefusalKind.SCHEMA
    return None


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except UNREADABLE:
        return body[:_MAX_FOREIGN_CHARS].decode("utf-8", "replace").strip()


def _right(payload: Any, dialect: Dialect, types: frozenset[str]) -> bool:
    """Whether it is its dialect's envelope, with one of these ``types`` where it is Anthropic's."""
    match payload:
        case {"type": "error", "error": {"type": str(kind), "message": str()}} if dialect is Dialect.ANTHROPIC:
            return kind in types
        case {"error": {"message": str(), **rest}} if dialect is not Dialect.ANTHROPIC:
            return all(isinstance(rest.get(field), str | None) for field in ("type", "param", "code"))
    return False


def _read(payload: Any) -> _ErrorText | None:
    match payload:
        case {"error": {"message": str(message), **rest}} | {"message": str(message), **rest}:
            return _ErrorText(message, _text(rest.get("type")), _text(rest.get("param")), _text(rest.get("code")))
        case {"error": str(message)} | {"detail": str(message)}:
            return _ErrorText(message)
        case {"detail": list(details)} if details:
            message, param = _validation(details)
            return _ErrorText(message, param=param)
        case str() if payload:
            return _ErrorText(payload)
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _validation(details: list[Any]) -> tuple[str, str | None]:
    """FastAPI's list of validation errors as one sentence, and the first field."""
    parts: list[str] = []
    first: str | None = None
    for detail in details[:5]:
        match detail:
            case {"msg": str(text), "loc": list(loc)}:
                field = ".".join(str(part) for part in loc if part != "body")
                parts.append(f"{field}: {text}" if field else text)
                first = first or field or None
            case _:
                parts.append(str(detail)[:200])
    return "; ".join(parts), first


def _of_status(status: int) -> tuple[str, str]:
    if status in _KINDS:
        return _KINDS[status]
    return (
        ("invalid_request_error", "invalid_request")
        if status < HTTPStatus.INTERNAL_SERVER_ERROR
        else ("server_error", "engine_error")
    )
