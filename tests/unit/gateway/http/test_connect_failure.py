import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from gateway.http.connect_failure import why_unreachable
from kvgate.ports import free_ports


async def by_asyncio(port: int) -> None:
    await asyncio.open_connection("127.0.0.1", port)


async def by_aiohttp(port: int) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/"):
        raise AssertionError("somebody answers")


@pytest.mark.parametrize("connect", [by_asyncio, by_aiohttp])
async def test_a_refused_connection_is_told_without_the_address(connect: Callable[[int], Awaitable[None]]) -> None:
    with pytest.raises(OSError, match="127") as caught:
        await connect(free_ports(1)[0])
    assert why_unreachable(caught.value) == "Connection refused"


async def test_what_speaks_no_tls_is_told_as_such() -> None:
    async def plain(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1")
    async with server:
        with pytest.raises(ssl.SSLError) as caught:
            await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=ssl.create_default_context())
    assert why_unreachable(caught.value).startswith("TLS failed: ")


def test_what_has_another_kind_of_number_or_none() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert why_unreachable(unknown) == "Name or service not known"
    assert why_unreachable(OSError("Multiple exceptions: ...")) == "none of its addresses answers"
    assert why_unreachable(OSError(errno.EHOSTUNREACH, "('10.0.0.1', 1)")) == "No route to host"
