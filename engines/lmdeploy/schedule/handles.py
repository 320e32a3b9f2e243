"""Removes LMDeploy's queue before the scheduler: requests wait only where their urgency is known.

LMDeploy hands out as many handles in the api_server as a batch has places, and twice as many in the engine process; a
request beyond them waits for one in the order of arrival, before any scheduler has heard of it, and a cancellation may
wait behind it. A handle holds nothing but a number, so both pools make one whenever none is free. What bounds the queue
instead is ``http/concurrency_limit.py``.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

_KEPT_MOST: Final = 1024
_LONGEST_PAUSE_S: Final = 32.0


class HandlePool:
    """LMDeploy's ``RequestHandlePool`` without its limit. The api_server's event loop."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: deque[Any] = deque()
        self.num_dispatched = 0
        """How many are out: requests that wait or run."""

    async def get(self) -> Any:
        """Return a handle at once."""
        handle = self._free.pop() if self._free else self._make()
        self.num_dispatched += 1
        return handle

    def put(self, handle: Any) -> None:
        """Take one back."""
        if handle is None:
            return
        self.num_dispatched -= 1
        if len(self._free) < _KEPT_MOST:
            self._free.append(handle)

    def clear(self) -> None:
        self._free.clear()


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def build_request_handle_pool(original: Callable[[Any, Any, int], None]) -> Callable[[Any, Any, int], None]:
    """``SessionManager.build_request_handle_pool``, in the api_server: no request waits for a handle."""

    def build_request_handle_pool(self: Any, engine: Any, size: int) -> None:
        if not type(engine).__module__.startswith("lmdeploy.pytorch."):
            original(self, engine, size)  # a handle of another engine is a real place
            return
        self.request_handle_pool = HandlePool(engine.create_instance)

    return build_request_handle_pool


def instance_pool_instance(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``EngineInstancePool.instance``, in the engine process: the same."""
    del original

    @asynccontextmanager
    async def instance(self: Any) -> AsyncIterator[Any]:
        free: deque[Any] = self.__dict__.setdefault("kvgate_free", deque())
        handle = free.pop() if free else self.engine.create_instance()
        try:
            yield handle
        finally:
            if len(free) < _KEPT_MOST:
                free.append(handle)

    return instance


def sender_async_recv(original: Callable[..., Any]) -> Callable[..., Any]:
    """``RequestSender.async_recv``, in the engine process: no stream waits for another one.

    LMDeploy lets one sender a millisecond through: the tokens of a step reach the last of 16 streams 20 ms late. That
    bounds how often a busy process sends a stream tokens. The bound isn't needed: tokens that come while the api_server
    still handles earlier ones wait in the stream's mailbox and go together. A step costs no more processor time.

    LMDeploy's looks once a second for each request that waits whether the engine's loop lives: with ten thousand that
    takes a quarter of the loop's time. Here the pauses double up to ``_LONGEST_PAUSE_S``. A loop that ends takes the
    process with it (``lifeline``).
    """
    del original

    async def async_recv(self: Any, resp: Any, wait_main: bool = False) -> Any:  # noqa: FBT001, FBT002 - LMDeploy's
        del wait_main
        from lmdeploy.messages import ResponseType

        pause_s = 1.0
        while not resp.event.is_set():
            try:
                async with asyncio.timeout(pause_s):
                    await resp.event.wait()
            except TimeoutError:
                if not self.is_loop_alive():
                    resp.type = ResponseType.ENGINE_STOP_ERROR
                    break
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        resp.event.clear()
        return resp

    return async_recv
