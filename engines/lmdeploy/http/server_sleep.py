"""Sleep, wake and other weights as the api_server serves them: one after the other, and honest to whom they interrupt.

LMDeploy's own routes run beside each other: a wake that came before its sleep was done left a server that took requests
for an engine that slept. And a request that was cut off by a sleep was answered 200 with what there was of it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any, Final

OPERATIONS: Final = frozenset(
    {
        "/sleep",
        "/wakeup",
        "/update_weights",
        "/update_weights_from_ipc",
        "/update_weights_from_distributed",
    }
)
"""The routes of operations that interrupt an engine's steps."""
_SLEEPS: Final = "kvgate_sleeps"

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]


class OperationOrderMiddleware:
    """Pure ASGI: operations that interrupt the engine's steps wait for each other. One event loop."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._lock = asyncio.Lock()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http" or scope["path"] not in OPERATIONS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        async with self._lock:
            await self._app(scope, receive, send)


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def async_engine_sleep(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """``AsyncEngine.sleep``: it is counted, before it aborts the requests under way."""

    async def sleep(self: Any, level: int = 1) -> None:
        setattr(self, _SLEEPS, getattr(self, _SLEEPS, 0) + 1)
        await original(self, level)

    return sleep


def async_engine_generate(original: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """``AsyncEngine.generate``: a request that a sleep cuts off fails, instead of ending as if that were its answer."""

    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        from lmdeploy.serve.core.exceptions import ErrorCode, RequestError

        sleeps, was_cut_off = getattr(self, _SLEEPS, 0), False
        async with aclosing(original(self, *args, **kwargs)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if output.finish_reason == "abort" and getattr(self, _SLEEPS, 0) != sleeps:
                    was_cut_off = True  # and it ends by itself
                else:
                    yield output
        if was_cut_off:
            raise RequestError(
                ErrorCode.ENGINE_UNAVAILABLE, "the engine was put to sleep before the answer was complete; ask again"
            )

    return generate
