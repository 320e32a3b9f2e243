"""An aiohttp application that a test talks to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from lab.conformance.listening import Listening


@asynccontextmanager
async def serving(app: web.Application, port: int = 0, *, handler_cancellation: bool = True) -> AsyncIterator[str]:
    """Serve while the block runs; yields the URL. See ``Listening.start``."""
    listening = await Listening.start(app, port, handler_cancellation=handler_cancellation)
    try:
        yield listening.url
    finally:
        await listening.stop()


__all__ = ["serving"]
