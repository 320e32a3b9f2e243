"""How what no route answers leaves: unknown routes and methods, and our own bugs, in OpenAI's envelope."""

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from gateway.errors import envelope


def add_last_handlers(app: FastAPI) -> None:
    """Answer whatever nothing else has answered."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods."""
    if not isinstance(error, HTTPException):
        raise error
    message = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not take {request.method}"}
    code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    body = envelope(message.get(error.status_code, str(error.detail)), kind="invalid_request_error", code=code)
    return Response(body, status_code=error.status_code, media_type="application/json", headers=error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    """The server logs the traceback itself; the client learns no more than that it happened."""
    del request, error
    body = envelope("the gateway failed", kind="server_error", code="internal_error")
    return Response(body, status_code=500, media_type="application/json")


__all__ = ["add_last_handlers"]
