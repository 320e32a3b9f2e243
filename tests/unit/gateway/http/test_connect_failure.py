import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Callable

import httpx2
import pytest

from gateway.http.client import fetch
from gateway.http.connect_failure import connect_failure_reason, is_own_fault
from kvgate.host.ports import free_ports
from tests.support.control_client import control_client


async def by_asyncio(port: int) -> None:
    await asyncio.open_connection("127.0.0.1", port)


async def by_client(port: int) -> None:
    async with control_client() as client:
        await fetch(client, "GET", f"http://127.0.0.1:{port}/", limit_bytes=1)


@pytest.mark.parametrize("connect", [by_asyncio, by_client])
async def test_a_refused_connection_is_told_without_the_address(connect: Callable[[int], Awaitable[None]]) -> None:
    with pytest.raises((OSError, httpx2.ConnectError)) as caught:
        await connect(free_ports(1)[0])
    assert connect_failure_reason(caught.value) == "Connection refused"


async def test_what_speaks_no_tls_is_told_as_such() -> None:
    async def plain(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1")
    async with server:
        with pytest.raises(ssl.SSLError) as caught:
            await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=ssl.create_default_context())
    assert connect_failure_reason(caught.value).startswith("TLS failed: ")


def test_what_has_another_kind_of_number_or_none() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert connect_failure_reason(unknown) == "Name or service not known"
    assert connect_failure_reason(OSError("Multiple exceptions: ...")) == "none of its addresses answers"
    assert connect_failure_reason(OSError(errno.EHOSTUNREACH, "('10.0.0.1', 1)")) == "No route to host"


async def test_a_lack_of_file_descriptors_is_this_process_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with control_client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", full)
            with pytest.raises(httpx2.ConnectError) as caught:
                await fetch(client, "GET", "http://127.0.0.1:9/", limit_bytes=1)
    assert is_own_fault(caught.value)


async def test_a_name_without_an_address_is_told_as_such() -> None:
    async with control_client() as client:
        with pytest.raises(httpx2.ConnectError) as caught:
            await fetch(client, "GET", "http://no-such-host.invalid/", limit_bytes=1)
    assert "127" not in connect_failure_reason(caught.value)
    assert not is_own_fault(caught.value)
