"""httpx2 over the pool's connections, to servers that answer byte for byte what a test says."""

import asyncio

import httpx2
import pytest

from gateway.http.client import AnswerTooLargeError, fetch
from kvgate.host.ports import free_ports
from tests.support.byte_server import CHUNKED, PLAIN, Server, answering, serving
from tests.support.control_client import control_client

EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"


async def test_a_request_leaves_as_it_is_meant_and_its_connection_is_used_again() -> None:
    async with serving(answering(PLAIN, CHUNKED, EMPTY)) as server, control_client() as client:
        got = [
            await fetch(client, "GET", server.url + "/a?b=c", limit_bytes=100),
            await fetch(
                client, "PUT", server.url + "/d", limit_bytes=100, content=b"{}", headers={"content-type": "x/y"}
            ),
            await fetch(client, "DELETE", server.url + "/e", limit_bytes=100),
        ]
    assert got == [(200, b"hello"), (200, b"hello world"), (204, b"")]
    assert server.connections == 1
    host = server.url.removeprefix("http://")
    first, second, third = (each.decode().lower().split("\r\n") for each in server.requests)
    assert first[0] == "get /a?b=c http/1.1"
    assert f"host: {host}" in first
    assert "accept-encoding: identity" in first
    assert second[0] == "put /d http/1.1"
    assert {"content-type: x/y", "content-length: 2"} <= set(second)
    assert second[-1] == "{}"
    assert third[0] == "delete /e http/1.1"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello",
        b"no HTTP at all\r\n\r\n",
    ],
    ids=["nothing", "half a head", "half a body", "no HTTP"],
)
async def test_an_answer_that_is_not_whole_is_a_protocol_error(answer: bytes) -> None:
    async with serving(answering(answer)) as server, control_client() as client:
        with pytest.raises(httpx2.RemoteProtocolError):
            await fetch(client, "GET", server.url + "/", limit_bytes=100)
        with pytest.raises(httpx2.RemoteProtocolError):
            await fetch(client, "GET", server.url + "/", limit_bytes=100)
    assert server.connections == 2


async def test_a_request_is_not_sent_twice_where_its_kept_connection_is_closed() -> None:
    closing = asyncio.Event()

    async def one_answer(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(PLAIN)
        await server.request(reader)
        closing.set()

    async with serving(one_answer) as server, control_client() as client:
        assert await fetch(client, "PUT", server.url + "/", limit_bytes=100, content=b"1") == (200, b"hello")
        with pytest.raises(httpx2.RemoteProtocolError):
            await fetch(client, "PUT", server.url + "/", limit_bytes=100, content=b"2")
        assert len(server.requests) == 2


async def test_an_answer_beyond_the_limit_and_one_that_nobody_waits_for_leave_no_connection() -> None:
    async def endless(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + bytes(500))
        await reader.read()

    async with serving(endless) as server, control_client() as client:
        with pytest.raises(AnswerTooLargeError):
            await fetch(client, "GET", server.url + "/", limit_bytes=100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await fetch(client, "GET", server.url + "/", limit_bytes=1000)
        while server.ended < 2:
            await asyncio.sleep(0.01)


async def test_where_nothing_listens_and_where_a_header_has_a_line_break_the_error_says_so() -> None:
    async with control_client() as client:
        url = f"http://127.0.0.1:{free_ports(1)[0]}/"
        with pytest.raises(httpx2.ConnectError):
            await fetch(client, "GET", url, limit_bytes=100)
    async with serving(answering(PLAIN)) as server, control_client() as client:
        with pytest.raises(httpx2.LocalProtocolError, match="two headers"):
            await fetch(client, "GET", server.url, limit_bytes=100, headers={"x-a": "1\r\nx-b: 2"})
        assert server.requests == []
