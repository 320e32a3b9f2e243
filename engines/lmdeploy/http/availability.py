"""An api_server whose engine process is gone answers 503, never 500: what is asked of it can be asked of another.

LMDeploy makes the death of its engine process an "internal error" of each request. A 500 says that the request itself
failed; a 503 before the first byte lets a gateway try another instance.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

_FAILED = 500

_Message = MutableMapping[str, Any]
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class EngineGoneMiddleware:
    """Pure ASGI: refuses at once while ``gone()``, and turns what fails because of that into a 503.

    The start of a response is held until its first byte, so that a stream which is nothing but an error is a 503 too.
    """

    def __init__(self, app: _App, gone: Callable[[], bool]) -> None:
        self._app = app
        self._gone = gone

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._gone():
            await _refusal()(scope, receive, send)
            return
        answer = _Answer(scope, receive, send, self._gone)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            if not await answer.refuse_if_gone():
                raise


class _Answer:
    def __init__(self, scope: _Scope, receive: _Receive, send: _Send, gone: Callable[[], bool]) -> None:
        self._scope, self._receive, self._send, self._gone = scope, receive, send, gone
        self._start: _Message | None = None
        self._started = False
        self._refused = False

    async def send(self, message: _Message) -> None:
        if self._refused:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None:
            if not message.get("body") and message.get("more_body"):
                return  # nothing yet
            if self._unfit(self._start, message) and await self.refuse_if_gone():
                return
            start, self._start = self._start, None
            self._started = True
            await self._send(start)
        await self._send(message)

    async def refuse_if_gone(self) -> bool:
        """Answer 503 when the engine is gone and nothing was sent; tell whether that was so."""
        if self._started or not self._gone():
            return False
        if not self._refused:
            self._refused = True
            await _refusal()(self._scope, self._receive, self._send)
        return True

    @staticmethod
    def _unfit(start: _Message, first: _Message) -> bool:
        return bool(start["status"] >= _FAILED) or bytes(first.get("body", b"")).startswith(b'data: {"error"')


def _refusal() -> JSONResponse:
    code = "engine_unavailable"
    message = "the engine process of this instance has ended; use another instance, or restart this one"
    return JSONResponse({"error": {"message": message, "type": code, "param": None, "code": code}}, status_code=503)
