"""An aiohttp application on a port of 127.0.0.1, which closes every connection that it has been given."""

import asyncio
import socket

from aiohttp import web

_BACKLOG = 4096


class Listening:
    """From ``start`` to ``stop``."""

    def __init__(self, runner: web.AppRunner, listener: socket.socket) -> None:
        self._runner = runner
        self._listener = listener

    @classmethod
    async def start(
        cls, app: web.Application, port: int = 0, *, shutdown_timeout_s: float = 0.1, handler_cancellation: bool = True
    ) -> "Listening":
        """Listen on ``port``, any free one by default; raises ``OSError`` where another has it.

        With ``handler_cancellation`` a handler is cancelled when its client leaves.
        """
        listener = socket.socket()
        runner = web.AppRunner(
            app, handler_cancellation=handler_cancellation, shutdown_timeout=shutdown_timeout_s, access_log=None
        )
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            await runner.setup()
            await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        except BaseException:
            await runner.cleanup()
            listener.close()
            raise
        return cls(runner, listener)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close the port and all connections.

        A connection that the event loop has accepted and not yet handed on is nobody's when its server closes: asyncio
        (3.11) drops it unclosed. So first nothing more is accepted, and what was gets its turn.
        """
        asyncio.get_running_loop().remove_reader(self._listener)
        await asyncio.sleep(0)
        await self._runner.cleanup()
