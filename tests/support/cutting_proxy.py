"""A TCP proxy that cuts or holds a connection at a chosen moment: after a request was done, before its answer."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class CuttingProxy:
    """Listens on ``port``, and passes everything on to ``target_port`` until it is told to cut."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._marker: bytes | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.cuts = 0
        self._held_markers: list[bytes] = []
        self.holding = False
        self._allowed: int | None = None
        self.waiting = self.passed = 0

    def allow(self, replies: int | None) -> None:
        """Pass on so many replies from now on, None for all; the others are ``waiting``."""
        self._allowed = replies

    def hold_at(self, *markers: bytes) -> None:
        """Hold all answers once these were sent, one after the other, until ``let_go``."""
        self._held_markers = list(markers)

    def let_go(self) -> None:
        self.holding = False

    def cut_at(self, marker: bytes) -> None:
        """Close the next connection that is sent this, once the server has answered that; its client gets nothing."""
        self._marker = marker

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with suppress(ConnectionError, asyncio.CancelledError):
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            cutting = asyncio.Event()
            ways = [
                asyncio.create_task(self._forth(reader, server_writer, cutting)),
                asyncio.create_task(self._back(server_reader, writer, cutting)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                server_writer.transport.abort()
                writer.transport.abort()

    async def _forth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cutting: asyncio.Event) -> None:
        while data := await reader.read(1 << 16):
            if self._marker is not None and self._marker in data:
                self._marker = None
                cutting.set()
            if self._held_markers and self._held_markers[0] in data:
                del self._held_markers[0]
                self.holding = not self._held_markers
            writer.write(data)
            await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cutting: asyncio.Event) -> None:
        while data := await reader.read(1 << 16):
            if cutting.is_set():
                self.cuts += 1
                return
            while self.holding:
                await asyncio.sleep(0.01)
            self.waiting += 1
            while self._allowed == 0:
                await asyncio.sleep(0.01)
            self.waiting -= 1
            if self._allowed is not None:
                self._allowed -= 1
            writer.write(data)
            self.passed += 1
            await writer.drain()

    async def close(self) -> None:
        connections = list(self._connections)
        for each in connections:
            each.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


@contextmanager
def cutting_proxy(target_port: int) -> Iterator[CuttingProxy]:
    """Run one before a server on loopback, in a thread: a gateway looks for its stores before its loop runs."""
    proxy = CuttingProxy(target_port)
    started = threading.Event()
    ended = asyncio.Event()

    async def run() -> None:
        async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
            proxy.port = int(server.sockets[0].getsockname()[1])
            started.set()
            await ended.wait()
            server.close()
            await proxy.close()
            await asyncio.sleep(0)  # so that sockets are closed, too

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=[run()])
    thread.start()
    try:
        assert started.wait(60)
        yield proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


__all__ = ["CuttingProxy", "cutting_proxy"]
