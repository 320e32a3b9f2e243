"""Old and unusual clients: HTTP/1.0, half-closed connections, garbage in a pipeline, clients that never read."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests.support.fleet import CHAT, Fleet, chat, running_fleet, script
from tests.support.running_gateway import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEVER_READING = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    settings = {"header_timeout_s": 1.0, "send_timeout_s": 1.0, "keep_alive_timeout_s": 2.0}
    async with running_fleet(tmp_path_factory.mktemp("fleet"), **settings) as running:
        yield running


def port(fleet: Fleet) -> int:
    return int(fleet.gateway.url.rpartition(":")[2])


def request(version: str = "1.1", *, how: str = "{}", **fields: Any) -> bytes:
    body = json.dumps(chat(**fields)).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nhost: localhost\r\nx-script: {how}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def answered(fleet: Fleet, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes and return all that comes until the gateway ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port(fleet))
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def statuses(said: bytes) -> list[bytes]:
    """The status of each final answer, in order."""
    return [each[:3] for each in said.split(b"HTTP/1.1 ")[1:] if not each.startswith(b"100")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_http_1_0_gets_no_chunks(fleet: Fleet, *, stream: bool) -> None:
    head, _, body = (await answered(fleet, request("1.0", stream=stream))).partition(b"\r\n\r\n")
    assert statuses(head) == [b"200"]
    assert b"transfer-encoding" not in head.lower()
    if stream:
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(body)["object"] == "chat.completion"


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/dashboard", "/nowhere"])
async def test_operators_routes_answer_http_1_0(fleet: Fleet, path: str) -> None:
    head, _, body = (await answered(fleet, f"GET {path} HTTP/1.0\r\n\r\n".encode())).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", [{}, {"ttft_s": 0.7}, {"chunk_s": 0.3}], ids=["soon", "late", "in pieces"])
async def test_a_client_that_has_sent_all_and_says_so_gets_its_answer(
    fleet: Fleet, how: dict[str, Any], *, stream: bool
) -> None:
    said = await answered(fleet, request(how=script(**how), stream=stream), half_close=True)
    assert statuses(said) == [b"200"]
    if stream:
        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert json.loads(said.rpartition(b"\r\n\r\n")[2])["object"] == "chat.completion"


async def test_all_of_a_half_closed_pipeline_is_answered(fleet: Fleet) -> None:
    said = await answered(fleet, request(how=script(ttft_s=0.3)) + request() + request(stream=True), half_close=True)
    assert statuses(said) == [b"200"] * 3


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(
    "how", [{"ttft_s": 60}, {"chunks": 1000, "chunk_s": 0.05}, {"stall_after": 1}], ids=["waits", "flows", "stalls"]
)
@pytest.mark.parametrize("pipelined", [0, 1, 3])
@pytest.mark.parametrize("late", [False, True])
async def test_the_leaving_of_a_client_ends_its_request(
    fleet: Fleet, version: str, how: dict[str, Any], pipelined: int, *, late: bool
) -> None:
    aborted = fleet.aborted
    reader, writer = await asyncio.open_connection("127.0.0.1", port(fleet))
    first, others = request(version, how=script(**how), stream=True), request(version) * pipelined
    writer.write(first if late else first + others)
    await eventually(lambda: fleet.active == 1)
    if late:
        writer.write(others)
        await writer.drain()
    if "ttft_s" not in how:
        async with asyncio.timeout(20):
            assert b"tok0" in await reader.readuntil(b"tok0")
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    await eventually(lambda: fleet.active == 0)
    assert fleet.aborted == aborted + 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"\x16\x03\x01 garbage\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + (b"x: " + b"a" * 997 + b"\r\n") * 70, b"431"),
        (request().replace(b"content-length", b"transfer-encoding: chunked\r\nx"), b"400"),
        (request().replace(b"content-length", b"transfer-encoding: gzip, chunked\r\nx"), b"501"),
    ],
    ids=["bytes", "version", "hosts", "long", "chunks", "coding"],
)
async def test_garbage_behind_a_request_is_refused_after_its_answer(
    fleet: Fleet, garbage: bytes, status: bytes, *, late: bool
) -> None:
    before = fleet.requests
    first = request(how=script(ttft_s=0.4))
    reader, writer = await asyncio.open_connection("127.0.0.1", port(fleet))
    writer.write(first if late else first + garbage)
    if late:
        await eventually(lambda: fleet.active == 1)
        writer.write(garbage)
    async with asyncio.timeout(30):
        said = await reader.read()
    writer.close()
    assert statuses(said) == [b"200", status]
    assert fleet.requests == before + 1


@pytest.mark.parametrize("begun", [b"POST /v1/chat/com", request()[:-10]], ids=["head", "body"])
async def test_a_request_that_is_broken_off_takes_no_answer_from_the_one_before(fleet: Fleet, begun: bytes) -> None:
    """A head that never ends is cut off, a body is cut off when its client leaves; the first answer is there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port(fleet))
    writer.write(request(how=script(ttft_s=1.5)) + begun)
    async with asyncio.timeout(30):
        said = await reader.readuntil(b"chat.completion")
        writer.close()
    assert statuses(said) == [b"200"]


@pytest.mark.parametrize("value", ["gzip, chunked", "chunked, chunked", "gzip", "identity", "chunked;q=1", "Chunked"])
async def test_the_only_transfer_coding_is_chunked(fleet: Fleet, value: str) -> None:
    body = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: {value}\r\n\r\n"
    before = fleet.requests
    said = await answered(fleet, head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    taken = value == "Chunked"
    assert statuses(said)[0] in ([b"200"] if taken else [b"501", b"400"])
    assert fleet.requests == before + taken


def unread(port: int) -> socket.socket:
    """A client's end of a connection, with little room for an answer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.settimeout(0)
    return client


def connected(fleet: Fleet, client: socket.socket) -> Callable[[], bool]:
    """Whether the gateway still has its end of a connection."""
    mine = client.getsockname()[1]

    def look() -> bool:
        return any(
            each.laddr.port == port(fleet) and each.raddr and each.raddr.port == mine
            for each in psutil.Process().net_connections(kind="tcp")
        )

    return look


@pytest.mark.parametrize("end", [b"", b"connection: close\r\n"])
@pytest.mark.parametrize(
    "fields",
    [{"stream": stream, "how": script(chunks=8_000, text="x" * 1000)} for stream in (True, False)],
    ids=["stream", "whole"],
)
async def test_clients_that_never_read_are_cut_off(fleet: Fleet, fields: dict[str, Any], end: bytes) -> None:
    before, held = fleet.requests, []
    with ExitStack() as stack:
        for _ in range(NEVER_READING):
            client = stack.enter_context(unread(port(fleet)))
            await asyncio.get_running_loop().sock_sendall(client, request(**fields).replace(b"\r\n", b"\r\n" + end, 1))
            held.append(connected(fleet, client))
        await eventually(lambda: fleet.requests == before + NEVER_READING)
        await eventually(lambda: fleet.active == 0)
        await eventually(lambda: not any(each() for each in held))


async def test_clients_that_never_read_do_not_keep_a_gateway_from_stopping(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, send_timeout_s=3600.0, shutdown_grace_s=0.5) as fleet:
        with ExitStack() as stack:
            for _ in range(NEVER_READING):
                client = stack.enter_context(unread(port(fleet)))
                asked = request(stream=True, how=script(chunks=8_000, text="x" * 1000))
                await asyncio.get_running_loop().sock_sendall(client, asked)
            await eventually(lambda: fleet.active == NEVER_READING)
            fleet.gateway.stop()
            await fleet.gateway.stopped()
            assert fleet.active == 0


async def test_an_idle_connection_is_kept_for_longer_than_load_balancers_do(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, keep_alive_timeout_s=1.0) as fleet:
        reader, writer = await asyncio.open_connection("127.0.0.1", port(fleet))
        for _ in range(2):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            async with asyncio.timeout(20):
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(20):
            assert await reader.read() == b"", "it is closed then"
        writer.close()
