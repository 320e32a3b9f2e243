"""The shapes in which errors leave: OpenAI's envelope and Anthropic's.

OpenAI's is ``{"error": {"message", "type", "param", "code"}}``, Anthropic's ``{"type": "error", "error": {"type",
"message"}}``. ``refusal`` reads those of engines, which have other shapes, too.
"""

from http import HTTPStatus

import msgspec

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


def envelope(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return OpenAI's error envelope as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def anthropic_envelope(status: int, message: str) -> bytes:
    """Return Anthropic's error envelope as JSON; its types follow from the status."""
    kind = _ANTHROPIC_KINDS.get(
        status, "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    )
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})


__all__ = ["anthropic_envelope", "envelope"]
