"""Every error that the gateway raises on purpose, and the one place where errors become OpenAI's envelope.

GatewayError
├── StartupError              the process can't start; the message says what to change
│   ├── SettingsError         a setting is unknown, missing or invalid
│   └── StateError            the state folder can't be used
└── ApiError                  a request is answered with an envelope
    ├── InvalidRequestError       400
    ├── AuthenticationError       401
    ├── NotFoundError             404  route or model
    ├── MethodNotAllowedError     405
    ├── BodyTimeoutError          408
    ├── BodyTooLargeError         413
    ├── UpstreamUnreachableError  502
    ├── NoInstanceError           503  with Retry-After
    └── UpstreamTimeoutError      504

The envelope is ``{"error": {"message", "type", "param", "code"}}``. Engines answer in other shapes (LMDeploy puts the
fields on top level, FastAPI says ``detail``); ``envelope_of_answer`` re-wraps those and leaves a right one untouched.
"""

from http import HTTPStatus
from typing import Any, ClassVar

import msgspec

_MAX_FOREIGN_CHARS = 2000


class GatewayError(Exception):
    """Base of all."""


class StartupError(GatewayError):
    """The process can't start."""

    exit_code: ClassVar[int] = 1


class SettingsError(StartupError):
    """A setting is unknown, missing or invalid; the message names file, key, value and what is allowed."""

    exit_code = 2


class StateError(StartupError):
    """The state folder can't be used; the message names the path and the cause."""

    exit_code = 2


class ApiError(GatewayError):
    """A request ends with this envelope. ``retry_after_s`` becomes a header when it is set."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = code or self.code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        return envelope(self.message, kind=self.type, param=self.param, code=self.reason)


class InvalidRequestError(ApiError):
    """The request itself is wrong; the same one will always fail."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class AuthenticationError(ApiError):
    """No API key, or one that is not configured."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(ApiError):
    """No such route or model."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowedError(ApiError):
    """The route exists, not for this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTimeoutError(ApiError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLargeError(ApiError):
    """The request is longer than the configured bound."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UpstreamUnreachableError(ApiError):
    """An instance could not be reached, or closed the connection before it answered, and no other could take over."""

    status = 502
    type = "upstream_error"
    code = "upstream_unreachable"


class NoInstanceError(ApiError):
    """No instance can serve this now; trying again later makes sense."""

    status = 503
    type = "service_unavailable_error"
    code = "no_instance"


class UpstreamTimeoutError(ApiError):
    """An instance took the request and did not answer in time."""

    status = 504
    type = "upstream_error"
    code = "upstream_timeout"


def envelope(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return OpenAI's error envelope as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def envelope_of_answer(status: int, body: bytes) -> bytes:
    """Return what an engine said with an error status, as an envelope; one that is right already stays byte for
    byte.
    """
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        said = body[:_MAX_FOREIGN_CHARS].decode("utf-8", "replace").strip()
    match said:
        case {"error": {"message": str()}}:
            return body
        case {"message": str(message), **rest}:
            kind, param = rest.get("type"), rest.get("param")
        case {"error": str(message)}:
            kind, param = None, None
        case {"detail": str(message)}:
            kind, param = None, None
        case {"detail": list(details)} if details:
            message, param = _validation(details)
            kind = None
        case str() if said:
            message, kind, param = said, None, None
        case _:
            message, kind, param = f"the engine answered with status {status} and no message", None, None
    default_kind, code = _of_status(status)
    return envelope(
        message,
        kind=kind if isinstance(kind, str) and kind else default_kind,
        param=param if isinstance(param, str) else None,
        code=code,
    )


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


def _of_status(status: int) -> tuple[str, str]:
    if status in _KINDS:
        return _KINDS[status]
    return (
        ("invalid_request_error", "invalid_request")
        if status < HTTPStatus.INTERNAL_SERVER_ERROR
        else ("server_error", "engine_error")
    )


__all__ = [
    "ApiError",
    "AuthenticationError",
    "BodyTimeoutError",
    "BodyTooLargeError",
    "GatewayError",
    "InvalidRequestError",
    "MethodNotAllowedError",
    "NoInstanceError",
    "NotFoundError",
    "SettingsError",
    "StartupError",
    "StateError",
    "UpstreamTimeoutError",
    "UpstreamUnreachableError",
    "envelope",
    "envelope_of_answer",
]
