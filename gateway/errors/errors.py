"""Every error that the gateway raises on purpose, with its status.

GatewayError
├── StartupError              the process can't start; the message says what to change
│   ├── SettingsError         a setting is unknown, missing or invalid
│   └── StateError            the state folder can't be used
└── ApiError                  a request is answered with an envelope
    ├── InvalidRequestError       400
    │   └── ContextLengthError    400  more tokens than may be used in one request
    ├── AuthenticationError       401
    ├── PermissionDeniedError     403  the key is known, and may not do this
    ├── NotFoundError             404  route or model
    ├── MethodNotAllowedError     405
    ├── BodyTimeoutError          408
    ├── ConflictApiError          409  somebody else changed it
    ├── PreconditionError         412  If-Match or If-None-Match does not hold
    ├── BodyTooLargeError         413
    ├── UnsupportedMediaTypeError 415
    ├── IdempotencyError          422  an idempotency key used for another request
    ├── RateLimitedError          429  with Retry-After
    ├── UpstreamFailedError       502  an instance failed the request
    ├── NoInstanceError           503  with Retry-After
    ├── PlanCancelledError        503  an operator has ended it
    ├── ShuttingDownError         503  with Retry-After: this process is ending
    ├── UpstreamTimeoutError      504
    ├── DeadlineError             504  the request's own time is over
    └── LoopError                 508  the request has been here before

The shapes in which they leave are in ``envelopes``.
"""

from collections.abc import Iterable
from typing import ClassVar, Final

from gateway.errors.context_length import CODE as CONTEXT_CODE
from gateway.errors.context_length import ContextLength
from gateway.errors.envelopes import anthropic_envelope, envelope
from gateway.types import Dialect

_SHUTDOWN_RETRY_S: Final = 1


class GatewayError(Exception):
    """Base of all."""


class StartupError(GatewayError):
    """The process can't start."""

    exit_code: ClassVar[int] = 1


class SettingsError(StartupError):
    """A setting is unknown, missing or invalid; the message names file, key, value and the allowed values."""

    exit_code = 2


class StateError(StartupError):
    """The state folder can't be used; the message names the path and the cause."""

    exit_code = 2


class ApiError(GatewayError):
    """A request ends with this envelope. ``retry_after_s`` becomes a header when it is set, ``headers`` go with it."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = code or self.code
        self.retry_after_s = retry_after_s
        self.headers = headers

    def body(self, dialect: Dialect = Dialect.OPENAI) -> bytes:
        if dialect is Dialect.ANTHROPIC:
            return anthropic_envelope(self.status, self.message)
        return envelope(self.message, kind=self.type, param=self.param, code=self.reason)


class InvalidRequestError(ApiError):
    """The request itself is wrong; the same one will always fail."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    """Prompt and answer are longer than they may be; clients shorten a conversation when they read of that."""

    code = CONTEXT_CODE

    def __init__(self, message: str, length: ContextLength) -> None:
        super().__init__(message)
        self.length = length

    def body(self, dialect: Dialect = Dialect.OPENAI) -> bytes:
        if dialect is Dialect.ANTHROPIC:
            return anthropic_envelope(self.status, self.length.for_anthropic(self.message))
        return super().body(dialect)


class AuthenticationError(ApiError):
    """No API key, or one that is not configured."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDeniedError(ApiError):
    """The key is known, and lacks access to the resource."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFoundError(ApiError):
    """No such route or model."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowedError(ApiError):
    """The route exists, not for this method: ``Allow`` names those that it is for."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, path: str, method: str, *, allowed: Iterable[str]) -> None:
        methods = ", ".join(sorted(allowed))
        super().__init__(
            f"{path} takes {methods}, not {method}", headers=((b"allow", methods.encode()),) if methods else ()
        )


class BodyTimeoutError(ApiError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class ConflictApiError(ApiError):
    """The change conflicts with the present state."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class PreconditionError(ApiError):
    """The document is not the one that the request is meant for."""

    status = 412
    type = "invalid_request_error"
    code = "precondition_failed"


class UnsupportedMediaTypeError(ApiError):
    """The body is of a type, or in an encoding, that is not taken here."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class IdempotencyError(ApiError):
    """An idempotency key stands for one request, not for two."""

    status = 422
    type = "invalid_request_error"
    code = "idempotency_key_reused"


class BodyTooLargeError(ApiError):
    """The request is longer than the configured bound."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class RateLimitedError(ApiError):
    """A limit of the caller's own is reached, or the gateway is saturated; later the same request may pass."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class UpstreamFailedError(ApiError):
    """An instance failed the request, before its answer or within it, and no other instance could take over."""

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


class DeadlineError(ApiError):
    """The time that the whole request may take is over, wherever it was spent."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class LoopError(ApiError):
    """The request has passed this gateway before; automatic retries are disabled by a header."""

    status = 508
    type = "upstream_error"
    code = "loop_detected"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=((b"x-should-retry", b"false"),))


class PlanCancelledError(ApiError):
    """An operator has ended the request; automatic retries are disabled by a header."""

    status = 503
    type = "service_unavailable_error"
    code = "cancelled"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the request was cancelled by an operator: {reason}", headers=((b"x-should-retry", b"false"),)
        )


class ShuttingDownError(ApiError):
    """The gateway is ending; another one, or this one once it runs again, can take the request."""

    status = 503
    type = "service_unavailable_error"
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__(
            "this gateway is shutting down; send the request again",
            retry_after_s=_SHUTDOWN_RETRY_S,
            headers=((b"connection", b"close"),),
        )
