"""The shapes in which errors leave: OpenAI's envelope and Anthropic's.

OpenAI's is ``{"error": {"message", "type", "param", "code"}}``, Anthropic's ``{"type": "error", "error": {"type",
"message"}}``. Engines answer in other shapes (LMDeploy puts the fields on top level, FastAPI says ``detail``);
``envelope_of_answer`` re-wraps those and leaves a right one untouched.
"""

from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from gateway.types import Dialect
from kvcontrol.core.errors import UNREADABLE

_MAX_FOREIGN_CHARS = 2000
_BEYOND_STATUSES = 600

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
}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class _Said(NamedTuple):
    """What a foreign answer says."""

    message: str
    kind: str | None = None
    param: str | None = None
    code: str | None = None


def envelope(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return OpenAI's error envelope as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def anthropic_envelope(status: int, message: str) -> bytes:
    """Return Anthropic's error envelope as JSON; its types follow from the status."""
    kind = _ANTHROPIC_KINDS.get(
        status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    )
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


def envelope_of_answer(status: int, body: bytes, dialect: Dialect = Dialect.OPENAI) -> bytes:
    """Return what an engine said with an error status, as an envelope; one that is right already stays byte for
    byte.
    """
    try:
        said: Any = msgspec.json.decode(body)
    except UNREADABLE:
        said = body[:_MAX_FOREIGN_CHARS].decode("utf-8", "replace").strip()
    if _right(said, dialect):
        return body
    read = _read(said) or _Said(f"the engine answered with status {status} and no message")
    if dialect is Dialect.ANTHROPIC:
        return anthropic_envelope(status, read.message)
    kind, code = _of_status(status)
    return envelope(read.message, kind=read.kind or kind, param=read.param, code=read.code or code)


def envelope_of_event(data: bytes) -> bytes | None:
    """Return the error that an engine put into a stream of OpenAI's dialect as an envelope, None where it is one.

    LMDeploy's own has a number for a ``code``, which is the status that it would have answered with.
    """
    try:
        said: Any = msgspec.json.decode(data)
    except UNREADABLE:
        return None
    if _right(said, Dialect.OPENAI):
        return None
    match said:
        case {"error": {"code": int(status)}} if HTTPStatus.BAD_REQUEST <= status < _BEYOND_STATUSES:
            return envelope_of_answer(status, data)
    return envelope_of_answer(HTTPStatus.INTERNAL_SERVER_ERROR, data)


def _right(said: Any, dialect: Dialect) -> bool:
    match said:
        case {"type": "error", "error": {"type": str(), "message": str()}} if dialect is Dialect.ANTHROPIC:
            return True
        case {"error": {"message": str(), **rest}} if dialect is not Dialect.ANTHROPIC:
            return all(isinstance(rest.get(field), str | None) for field in ("type", "param", "code"))
    return False


def _read(said: Any) -> _Said | None:
    match said:
        case {"error": {"message": str(message), **rest}} | {"message": str(message), **rest}:
            return _Said(message, _text(rest.get("type")), _text(rest.get("param")), _text(rest.get("code")))
        case {"error": str(message)} | {"detail": str(message)}:
            return _Said(message)
        case {"detail": list(details)} if details:
            message, param = _validation(details)
            return _Said(message, param=param)
        case str() if said:
            return _Said(said)
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


__all__ = [
    "anthropic_envelope",
    "envelope",
    "envelope_of_answer",
    "envelope_of_event",
]
