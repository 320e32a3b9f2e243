"""Requests that a simulated instance refuses: why, and the answer in each dialect."""

from http import HTTPStatus
from typing import Final

from fastapi import Request
from fastapi.responses import JSONResponse, Response

MOST_BODY_BYTES: Final = 64 << 20


class RefusedRequestError(Exception):
    """Becomes an answer in OpenAI's envelope, or in a dialect's; ``param`` is the field that is refused."""

    def __init__(
        self, status: HTTPStatus, message: str, code: str = "invalid_request_error", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def answer(self) -> Response:
        """Return the answer."""
        error = {"message": str(self), "type": self.code, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, status_code=self.status)


async def read_body(request: Request) -> bytes:
    """Return a request's body; raises ``RefusedRequestError`` for one that is too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise RefusedRequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {MOST_BODY_BYTES} bytes"
            )
    return bytes(body)
