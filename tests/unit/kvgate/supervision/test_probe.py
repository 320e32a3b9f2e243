import asyncio

import pytest

from kvgate.host.ports import free_ports
from kvgate.supervision.probe import HttpProbe


async def serve(status: str) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


@pytest.mark.parametrize(("status", "ready"), [("200 OK", True), ("503 Service Unavailable", False)])
async def test_only_200_is_ready(status: str, *, ready: bool) -> None:
    server = await serve(status)
    async with server, HttpProbe() as probe:
        assert await probe(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/") is ready


async def test_nobody_there_is_not_ready_and_no_error() -> None:
    async with HttpProbe() as probe:
        assert not await probe(f"http://127.0.0.1:{free_ports(1)[0]}/")


async def test_what_is_no_json_object_reads_as_nothing() -> None:
    server = await serve("503 Service Unavailable")
    async with server, HttpProbe() as probe:
        assert await probe.read(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/") == {}
        assert await probe.read(f"http://127.0.0.1:{free_ports(1)[0]}/") == {}


async def test_it_belongs_into_its_context() -> None:
    with pytest.raises(RuntimeError, match="outside its context"):
        await HttpProbe()("http://127.0.0.1:1/")
