"""A server that answers byte for byte what a test says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nContent-Type: text/plain\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"
    b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nx-trailer: 1\r\n\r\n"
)


@dataclass
class Server:
    """Counts its connections and keeps what it was sent."""

    url: str = ""
    connections: int = 0
    ended: int = 0
    requests: list[bytes] = field(default_factory=list)

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """Read one request; empty when there is none any more."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        self.requests.append(head + await reader.readexactly(length))
        return self.requests[-1]


@asynccontextmanager
async def serving(
    script: Callable[[Server, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Server]:
    state = Server()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state.connections += 1
        try:
            await script(state, reader, writer)
        except ConnectionError:
            pass
        finally:
            state.ended += 1
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    state.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield state


def answering(*answers: bytes) -> Callable[[Server, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Answer each request of a connection with the next of these, then close."""

    async def script(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            if not await server.request(reader):
                return
            writer.write(answer)
            await writer.drain()

    return script
