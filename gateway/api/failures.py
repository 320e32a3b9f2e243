"""Answers outside of routes: unknown routes and methods, and our own defects, in OpenAI's envelope."""

from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from gateway.errors import MethodNotAllowedError
from gateway.errors.envelopes import envelope
from gateway.errors.unknown_route import unknown_route

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def add_last_handlers(app: FastAPI) -> None:
    """Answer whatever nothing else has answered."""
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods."""
    if not isinstance(error, HTTPException):
        raise error
    path, headers = request.url.path, error.headers
    message, code = str(error.detail), "invalid_request"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message, code = unknown_route(path), "unknown_route"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        refusal = MethodNotAllowedError(path, request.method, allowed=_methods(request))
        message, code = refusal.message, refusal.reason
        headers = {name.decode(): value.decode() for name, value in refusal.headers}
    body = envelope(message, kind="invalid_request_error", code=code)
    return Response(body, status_code=error.status_code, media_type="application/json", headers=headers)


def _methods(request: Request) -> set[str]:
    """What the routes of a path take together; the one that refused names its own alone."""
    methods = {
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    }
    return methods | {"HEAD"} if "GET" in methods else methods


async def _bug(request: Request, error: Exception) -> Response:
    """The server logs the traceback itself; the client learns no more than that it happened."""
    del request, error
    body = envelope("the gateway failed", kind="server_error", code="internal_error")
    return Response(body, status_code=500, media_type="application/json")
