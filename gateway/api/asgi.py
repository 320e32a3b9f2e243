"""The outermost ASGI app: pages of other origins are stopped here, inference and operators' routes part."""

import asyncio
import contextlib
from typing import Any

from fastapi import FastAPI

from gateway.api.browsers import Browsers, Visit
from gateway.api.described import inference_paths
from gateway.api.openai import OpenAiApi, dialect_of, serves
from gateway.errors import ShuttingDownError
from gateway.http.exchange import Exchange, Receive, Scope, Send
from gateway.http.shutdown import Shutdown

_REFUSAL_S = 5.0


class Gateway(FastAPI):
    """FastAPI for operators; inference goes past its middleware and router, which would cost as much as the rest.

    Whatever takes ``GET`` takes ``HEAD``: the server leaves out the body of an answer to that.
    """

    inference: OpenAiApi | None = None
    browsers: Browsers | None = None

    def __init__(self, shutdown: Shutdown, **options: Any) -> None:
        super().__init__(**options)
        self.shutdown = shutdown

    def openapi(self) -> dict[str, Any]:
        """Return the description of FastAPI's routes, and of those that go past it."""
        described = super().openapi()
        described["paths"] = inference_paths() | described["paths"]
        return described

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        inference = self.inference if serves(scope["path"]) else None
        if self.browsers is not None and (visit := self.browsers.look(scope, shared=inference is not None)) is not None:
            send = visit.sends(send)
            if visit.refusal is not None or visit.preflight:
                await _answer_page(visit, scope, receive, send)
                return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        try:
            await (inference or super().__call__)(scope, receive, send)
        except asyncio.CancelledError:
            if not self.shutdown.begun:
                raise
            await _answer_end(scope, receive, send)


async def _answer_end(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request that the gateway's shutdown cancels; cut off an answer that has begun."""
    exchange = Exchange(scope, receive, send, send_timeout_s=_REFUSAL_S, dialect=dialect_of(scope["path"]))
    with contextlib.suppress(RuntimeError):  # the server's word for an answer that has begun: it closes the connection
        await exchange.refuse(ShuttingDownError())


async def _answer_page(visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer what goes no further: a refusal in the envelope of the route's API, or a preflight request."""
    if visit.refusal is None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    exchange = Exchange(scope, receive, send, send_timeout_s=_REFUSAL_S, dialect=dialect_of(scope["path"]))
    await exchange.refuse(visit.refusal, [(b"connection", b"close")])
