"""The shapes in which errors leave: OpenAI's envelope and Anthropic's.

OpenAI's is ``{"error": {"message", "type", "param", "code"}}``, Anthropic's ``{"type": "error", "error": {"type",
"message"}}``. ``refusal`` reads those of engines, which have other shapes, too.
"""

from http import HTTPStatus

import msgspec

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OTHER_4XX, _OTHER_5XX = "invalid_request_error", "api_error"
ANTHROPIC_TYPES = frozenset({*_ANTHROPIC_TYPES.values(), _OTHER_4XX, _OTHER_5XX})
"""All types that Anthropic's clients know."""


def envelope(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return OpenAI's error envelope as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def anthropic_type(status: int) -> str:
    """Return the type of Anthropic's errors with this status."""
    return _ANTHROPIC_TYPES.get(status, _OTHER_4XX if status < HTTPStatus.INTERNAL_SERVER_ERROR else _OTHER_5XX)


def anthropic_envelope(status: int, message: str) -> bytes:
    """Return Anthropic's error envelope as JSON; its type follows from the status."""
    return msgspec.json.encode({"type": "error", "error": {"type": anthropic_type(status), "message": message}})
