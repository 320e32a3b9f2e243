"""The concurrency limit of an instance: past it a request is answered 429 at once, before its body is read.

LMDeploy's own ``--max-concurrent-requests`` makes requests wait without a bound and in the order of arrival, ahead of
any scheduler. Here they wait in the scheduler (``schedule/handles.py``), and this keeps their number finite.
"""

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

INFERENCE: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"})
_RETRY_AFTER_S: Final = b"1"
_log = logging.getLogger("lmdeploy.kvgate")

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class ConcurrencyLimitMiddleware:
    """Pure ASGI: lets at most ``bound`` inference requests be inside. One event loop."""

    def __init__(self, app: _App, bound: int) -> None:
        self._app = app
        self._bound = bound
        self.inside = 0
        self.refused = 0

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http" or scope["path"] not in INFERENCE:
            await self._app(scope, receive, send)
            return
        if self.inside >= self._bound:
            await self._refuse(send)
            return
        self.inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.inside -= 1

    async def _refuse(self, send: _Send) -> None:
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # 1st, 2nd, 4th, 8th...: a log, not a flood
            _log.warning(
                "kvgate: concurrency limit reached (%d requests wait or run); refused so far: %d",
                self.inside,
                self.refused,
            )
        message = f"concurrency limit reached ({self.inside} requests wait or run here); try again later or elsewhere"
        error = {"message": message, "type": "rate_limit_error", "param": None, "code": "engine_saturated"}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", _RETRY_AFTER_S),
        ]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": body})
