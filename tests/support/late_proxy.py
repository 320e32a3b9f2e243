"""An HTTP proxy that keeps chosen requests and delivers them later, also after their sender has ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class LateProxy:
    """Listens on ``port`` and passes requests on to ``target_port``, except those that begin with ``kept``."""

    def __init__(self, target_port: int, kept: bytes) -> None:
        self.target_port = target_port
        self._kept = kept
        self.port = 0
        self.requests: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                request = await _message(reader)
                if request.startswith(self._kept):
                    self.requests.append(request)
                else:
                    writer.write(await self._answer(request))
                    await writer.drain()
        writer.transport.abort()

    async def deliver(self) -> list[int]:
        """Deliver the kept requests; return the status of each answer."""
        kept, self.requests = self.requests, []
        return [int((await self._answer(each)).split(b" ", 2)[1]) for each in kept]

    async def _answer(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        try:
            writer.write(request)
            return await _message(reader)
        finally:
            writer.transport.abort()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + (await reader.readexactly(int(lengths[0].partition(b":")[2])) if lengths else b"")


@asynccontextmanager
async def late_proxy(target_port: int, kept: bytes = b"PUT /kv/v1/policy ") -> AsyncIterator[LateProxy]:
    """Run one before an engine on loopback."""
    proxy = LateProxy(target_port, kept)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        proxy.port = int(server.sockets[0].getsockname()[1])
        yield proxy
