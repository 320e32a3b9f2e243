"""Requests over real sockets to servers that answer byte for byte what a test says."""

import asyncio
import gzip
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.http import connection_pool
from gateway.http.connection import MOST_HEAD_BYTES
from gateway.http.connection_pool import ConnectionPool, Origin
from gateway.http.resolver import Address, Resolver, SystemResolver
from gateway.upstream import FailureKind, Timeouts, UpstreamClient, UpstreamFailureError
from tests.support.byte_server import CHUNKED, PLAIN, Server, answering, serving

PATIENT = Timeouts(connect_s=10, first_byte_s=20, idle_s=20, hung_s=10)


@asynccontextmanager
async def client(timeouts: Timeouts = PATIENT, resolver: Resolver | None = None) -> AsyncIterator[UpstreamClient]:
    connections = ConnectionPool(resolver or SystemResolver())
    try:
        yield UpstreamClient(connections, timeouts)
    finally:
        connections.close()


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def ask(
    shape: UpstreamClient, url: str, body: bytes = b"{}", hung: Callable[[], asyncio.Future[None]] = never
) -> tuple[int, bytes]:
    """Return status and body."""
    response = await shape.open(url, b"/v1/x", headers=[(b"x-a", b"\xff")], body=body, hung=hung)
    parts = []
    try:
        while part := await response.read():
            parts.append(part)
    finally:
        response.close()
    return response.status, b"".join(parts)


async def failure_of(shape: UpstreamClient, url: str, **more: Callable[[], asyncio.Future[None]]) -> FailureKind:
    with pytest.raises(UpstreamFailureError) as caught:
        await ask(shape, url, **more)
    return caught.value.kind


async def test_a_request_leaves_as_it_is_meant() -> None:
    async with serving(answering(PLAIN)) as server, client() as shape:
        assert await ask(shape, server.url, b'{"a": 1}') == (200, b"hello")
    host = server.url.removeprefix("http://").encode()
    assert server.requests == [
        b"POST /v1/x HTTP/1.1\r\nhost: " + host + b"\r\nx-a: \xff\r\ncontent-length: 8\r\n\r\n" + b'{"a": 1}'
    ]


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    async with (
        serving(answering(PLAIN, CHUNKED, PLAIN, b"HTTP/1.1 204 No Content\r\n\r\n", PLAIN)) as server,
        client() as shape,
    ):
        said = [await ask(shape, server.url) for _ in range(5)]
    assert said == [(200, b"hello"), (200, b"hello world"), (200, b"hello"), (204, b""), (200, b"hello")]
    assert server.connections == 1


async def test_an_answer_that_ends_after_the_client_was_closed_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_pool, "_IDLE_S", 3600.0)
    async with serving(answering(PLAIN, PLAIN)) as server:
        async with client() as shape:
            response = await shape.open(server.url, b"/v1/x", headers=[], body=b"{}", hung=never)
            assert await response.read() == b"hello"
        assert server.ended == 0
        response.close()
        async with asyncio.timeout(10):
            while not server.ended:
                await asyncio.sleep(0.01)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\n\r\nhello",  # ends with its connection
    ],
)
async def test_a_connection_that_is_to_be_closed_is_not_used_again(answer: bytes) -> None:
    async with serving(answering(answer)) as server, client() as shape:
        assert [await ask(shape, server.url) for _ in range(2)] == [(200, b"hello")] * 2
        assert server.connections == 2


@pytest.mark.parametrize(
    "answer", [PLAIN, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + PLAIN]
)
async def test_an_answer_is_the_same_however_the_network_cuts_it(answer: bytes) -> None:
    async def script(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cut = 0
        while await server.request(reader):
            cut += 1
            for part in (answer[:cut], answer[cut:]):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)

    async with serving(script) as server, client() as shape:
        said = {await ask(shape, server.url) for _ in range(1, len(answer))}
    assert said == {(200, b"hello world" if answer is CHUNKED else b"hello")}
    assert server.connections == 1


async def test_headers_and_trailers_are_kept_apart_and_interim_ones_are_dropped() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with serving(answering(interim + CHUNKED)) as server, client() as shape:
        response = await shape.open(server.url, b"/", headers=[], body=b"", hung=never)
        assert response.is_event_stream
        assert [name for name, _ in response.headers] == [b"transfer-encoding", b"content-type"]
        while await response.read():
            pass
        assert [name for name, _ in response.headers] == [b"transfer-encoding", b"content-type"]
        response.close()


async def test_what_comes_behind_an_answer_is_no_answer_to_the_next_request() -> None:
    forged = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nx-forged: 1\r\n\r\nforged"
    async with serving(answering(PLAIN + forged, PLAIN)) as server, client() as shape:
        response = await shape.open(server.url, b"/", headers=[], body=b"", hung=never)
        assert await response.read() == b"hello"
        assert b"x-forged" not in dict(response.headers)
        response.close()
        assert await ask(shape, server.url) == (200, b"hello")
        assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", FailureKind.NO_ANSWER),
        (b"HTTP/1.1 200 OK\r\ncontent-le", FailureKind.NO_ANSWER),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", FailureKind.NO_ANSWER),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe", FailureKind.CUT),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", FailureKind.CUT),
        (b"this is no HTTP\r\n\r\n", FailureKind.NO_HTTP),
        (b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", FailureKind.NO_HTTP),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", FailureKind.NO_HTTP),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 20) + b"\r\ncontent-length: 0\r\n\r\n", FailureKind.NO_HTTP),
        (b"HTTP/1.1 200 OK\r\n" + b"x: 1\r\n" * (1 << 18) + b"content-length: 0\r\n\r\n", FailureKind.NO_HTTP),
        (b"HTTP/1.1 100 Continue\r\nx: 1\r\n\r\n" * (1 << 15), FailureKind.NO_HTTP),
        (b"HTTP/1.1 200 " + b"O" * (1 << 20) + b"\r\ncontent-length: 0\r\n\r\n", FailureKind.NO_HTTP),
        (CHUNKED[:-2] + b"x: " + b"y" * (1 << 20) + b"\r\n\r\n", FailureKind.CUT),
        (CHUNKED[:-2] + b"x: 1\r\n" * (1 << 18) + b"\r\n", FailureKind.CUT),
        (b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://10.0.0.1/\r\n\r\n", FailureKind.REDIRECTED),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", FailureKind.REDIRECTED),
        (b"HTTP/1.1 999 OK\r\ncontent-length: 5\r\n\r\nhello", FailureKind.NO_HTTP),
        (b"HTTP/1.1 600 OK\r\n\r\n", FailureKind.NO_HTTP),
        (b"HTTP/1.1 099 OK\r\ncontent-length: 5\r\n\r\nhello", FailureKind.NO_HTTP),
    ],
)
async def test_an_answer_that_is_none_says_how(answer: bytes, kind: FailureKind) -> None:
    async with serving(answering(answer)) as server, client() as shape:
        assert await failure_of(shape, server.url) is kind


@pytest.mark.parametrize("piece", [1 << 20, 1000])
@pytest.mark.parametrize("lines", [1, 50])
async def test_a_header_may_be_as_long_as_the_bound_says_and_no_byte_longer(lines: int, piece: int) -> None:
    rest = MOST_HEAD_BYTES - sum(len(name) + len(value) + 4 for name, value in ((b"content-length", b"5"),))
    size = rest // lines

    def answer(more: int) -> bytes:
        sizes = [size] * (lines - 1)
        sizes.append(rest - sum(sizes) + more)
        head = b"".join(b"x-%02d: %s\r\n" % (number, b"y" * (each - 8)) for number, each in enumerate(sizes))
        return b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n" + head + b"\r\nhello"

    async def in_pieces(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for more in (0, 1):
            await server.request(reader)
            said = answer(more)
            for start in range(0, len(said), piece):
                writer.write(said[start : start + piece])
                await writer.drain()

    async with serving(in_pieces) as server, client() as shape:
        assert await ask(shape, server.url) == (200, b"hello")
        with pytest.raises(UpstreamFailureError, match=f"longer than {MOST_HEAD_BYTES} bytes") as caught:
            await ask(shape, server.url)
        assert caught.value.kind is FailureKind.NO_HTTP


@pytest.mark.parametrize("line", [b"y" * 4096, b"x: y\r\n" * 700])
async def test_a_header_without_an_end_is_not_collected(line: bytes) -> None:
    sent = 0

    async def endless(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await server.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nx: ")
        while True:  # until the connection is closed
            writer.write(line)
            await writer.drain()
            sent += len(line)

    async with serving(endless) as server, client() as shape:
        assert await failure_of(shape, server.url) is FailureKind.NO_HTTP
    assert sent < 64 << 20


async def test_bytes_that_came_before_a_cut_are_given_out() -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello")) as server, client() as shape:
        response = await shape.open(server.url, b"/", headers=[], body=b"", hung=never)
        while not server.ended:
            await asyncio.sleep(0.01)
        assert await response.read() == b"hello"
        with pytest.raises(UpstreamFailureError, match="ended within"):
            await response.read()
        response.close()


async def test_nobody_there() -> None:
    async with serving(answering()) as server:
        url = server.url
    async with client() as shape:
        with pytest.raises(UpstreamFailureError) as caught:
            await ask(shape, url)
    failure = caught.value
    assert failure.kind is FailureKind.CONNECT
    assert str(failure) == "the engine could not be reached: Connection refused"  # with no address


async def test_a_silent_instance_is_given_up() -> None:
    async def silent(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"begin" in await server.request(reader):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello")
        await reader.read()

    short = Timeouts(connect_s=5, first_byte_s=0.05, idle_s=0.3, hung_s=0.05)
    async with serving(silent) as server, client(short) as shape:
        assert await failure_of(shape, server.url) is FailureKind.FIRST_BYTE_TIMEOUT
    patient = Timeouts(connect_s=5, first_byte_s=20, idle_s=0.1, hung_s=0.05)
    async with serving(silent) as server, client(patient) as shape:
        with pytest.raises(UpstreamFailureError) as caught:
            await ask(shape, server.url, b"begin")
        assert caught.value.kind is FailureKind.IDLE_TIMEOUT


async def test_an_instance_that_hangs_is_given_up_at_once_before_its_answer_and_soon_within_it() -> None:
    async def silent(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"begin" in await server.request(reader):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello")
        await reader.read()

    times = Timeouts(connect_s=5, first_byte_s=600, idle_s=600, hung_s=0.05)
    hung = never()
    async with serving(silent) as server, client(times) as shape:
        asyncio.get_running_loop().call_later(0.05, hung.set_result, None)
        assert await failure_of(shape, server.url, hung=lambda: hung) is FailureKind.HUNG
        now = never()
        response = await shape.open(server.url, b"/", headers=[], body=b"begin", hung=lambda: now)
        assert await response.read() == b"hello"
        asyncio.get_running_loop().call_later(0.05, now.set_result, None)
        with pytest.raises(UpstreamFailureError, match="stopped answering within"):
            await response.read()
        response.close()


async def test_leaving_early_drops_the_connection() -> None:
    async def endless(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/never" not in await server.request(reader):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello")
        await reader.read()

    async with serving(endless) as server, client() as shape:
        response = await shape.open(server.url, b"/", headers=[], body=b"", hung=never)
        response.close()
        response.close()
        cancelled = asyncio.create_task(shape.open(server.url, b"/never", headers=[], body=b"", hung=never))
        while server.ended < 1 or len(server.requests) < 2:
            await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        async with asyncio.timeout(20):
            while server.ended < 2:
                await asyncio.sleep(0.01)


async def test_a_reader_that_does_not_keep_up_holds_the_instance_back() -> None:
    size = 64 << 20
    sent = 0

    async def flood(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await server.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1 << 20

    async with serving(flood) as server, client() as shape:
        response = await shape.open(server.url, b"/", headers=[], body=b"", hung=never)
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.3)
        assert sent < size // 2
        got = 0
        while part := await response.read():
            got += len(part)
        response.close()
        assert got == size


async def test_a_compressed_answer_is_opened_and_a_damaged_one_is_a_failure() -> None:
    packed = gzip.compress(b"hello" * 100)
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    async with serving(answering(head % len(packed) + packed, head % 5 + b"wrong")) as server, client() as shape:
        assert await ask(shape, server.url) == (200, b"hello" * 100)
        assert await failure_of(shape, server.url) is FailureKind.BAD_ENCODING


async def test_a_compressed_answer_of_several_members_is_whole_and_one_that_is_cut_is_a_failure() -> None:
    packed = gzip.compress(b"hello" * 100)
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    answers = (head % (2 * len(packed)) + 2 * packed, head % 0, head % 20 + packed[:20])
    async with serving(answering(*answers)) as server, client() as shape:
        assert await ask(shape, server.url) == (200, b"hello" * 200)
        assert await ask(shape, server.url) == (200, b"")
        assert await failure_of(shape, server.url) is FailureKind.BAD_ENCODING


class CopiesCounted:
    """zlib's object; counts the bytes behind a member that it copies."""

    copied = 0

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @property
    def unused_data(self) -> bytes:
        left: bytes = self._real.unused_data
        CopiesCounted.copied += len(left)
        return left


async def test_thousands_of_empty_members_are_not_copied_thousands_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    made = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda wbits: CopiesCounted(made(wbits=wbits)))
    packed = gzip.compress(b"") * 50_000 + gzip.compress(b"hello")
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
    async with serving(answering(head + packed)) as server, client() as shape:
        assert await ask(shape, server.url) == (200, b"hello")
    assert CopiesCounted.copied < 1_000 * len(packed)


async def test_an_answer_that_was_encoded_twice_is_left_as_it_is_whatever_lines_say_so() -> None:
    head = b"HTTP/1.1 200 OK\r\n%bcontent-length: 4\r\n\r\nabcd"
    twice = (b"content-encoding: gzip\r\ncontent-encoding: gzip\r\n", b"content-encoding: gzip, gzip\r\n")
    async with serving(answering(*(head % each for each in twice))) as server, client() as shape:
        for lines in (2, 1):
            response = await shape.open(server.url, b"/", headers=[], body=b"", hung=never)
            assert not response.readable
            assert sum(name == b"content-encoding" for name, _ in response.headers) == lines
            assert await response.read() == b"abcd"
            response.close()


async def test_a_compressed_answer_is_opened_a_piece_at_a_time() -> None:
    size = 20 << 20
    packed = gzip.compress(bytes(size))
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
    async with serving(answering(head + packed)) as server, client() as shape:
        response = await shape.open(server.url, b"/", headers=[], body=b"", hung=never)
        sizes = []
        while part := await response.read():
            sizes.append(len(part))
        assert response.exhausted
        response.close()
    assert sum(sizes) == size
    assert max(sizes) <= 1 << 20


async def test_a_kept_connection_that_closes_as_the_request_goes_out_is_replaced_once() -> None:
    async def script(server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.connections == 3:
            await server.request(reader)
            return
        await server.request(reader)
        writer.write(PLAIN)
        await writer.drain()
        await server.request(reader)  # and no answer to it

    async with serving(script) as server, client() as shape:
        assert await ask(shape, server.url) == (200, b"hello")
        assert await ask(shape, server.url, b"again") == (200, b"hello")
        assert server.connections == 2
        assert [request.rpartition(b"\r\n")[2] for request in server.requests] == [b"{}", b"again", b"again"]
        assert await failure_of(shape, server.url) is FailureKind.NO_ANSWER, "the new one closes too"
        assert server.connections == 3


TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


async def test_a_kept_connection_that_a_server_gives_up_with_a_408_is_replaced_once() -> None:
    """It says so of the silence before, as the request goes out; on a new connection it is an answer."""
    async with serving(answering(PLAIN, TOO_SLOW)) as server, client() as shape:
        for _ in range(3):
            assert await ask(shape, server.url) == (200, b"hello")
        assert server.connections == 3
    async with serving(answering(TOO_SLOW)) as server, client() as shape:
        assert await ask(shape, server.url) == (408, b"")
        assert server.connections == 1


async def test_an_idle_connection_that_was_closed_is_not_used() -> None:
    async with serving(answering(PLAIN)) as server, client() as shape:
        assert await ask(shape, server.url) == (200, b"hello")
        while server.ended < 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert await ask(shape, server.url) == (200, b"hello")
        assert server.connections == 2


async def test_a_header_with_a_line_break_is_never_sent() -> None:
    async with serving(answering(PLAIN)) as server, client() as shape:
        with pytest.raises(ValueError, match="line break"):
            await shape.open(server.url, b"/", headers=[(b"x", b"1\r\nevil: 1")], body=b"", hung=never)
        assert not server.requests


class Names:
    def __init__(self, *found: str) -> None:
        self.found = found
        self.shape = 0

    async def resolve(self, host: str, port: int) -> list[Address]:
        self.shape += 1
        if not self.found:
            raise OSError(None, f"{host} has no address")
        return [Address(family=socket.AF_INET, sockaddr=(each, port)) for each in self.found]


async def test_a_name_is_looked_up_under_the_rules_and_each_of_its_addresses_is_tried() -> None:
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello"
    names = Names("127.0.0.2", "127.0.0.1")
    async with serving(answering(closing)) as server, client(resolver=names) as shape:
        url = server.url.replace("127.0.0.1", "engine.example")
        assert [await ask(shape, url) for _ in range(2)] == [(200, b"hello")] * 2
        assert b"host: engine.example:" in server.requests[0]
        assert names.shape == 1
    async with client(resolver=Names()) as shape:
        assert await failure_of(shape, "http://engine.example:9000") is FailureKind.CONNECT


def test_where_an_instance_is() -> None:
    plain = Origin.of("http://10.0.0.7:9001")
    assert (plain.name, plain.port, plain.tls, plain.head) == ("10.0.0.7", 9001, False, b"POST ")
    assert plain.host == b" HTTP/1.1\r\nhost: 10.0.0.7:9001\r\n"
    assert Origin.of("http://[::1]:80").host == b" HTTP/1.1\r\nhost: [::1]\r\n"
    under = Origin.of("https://u:p%40@engine/base/")
    assert (under.port, under.tls, under.head) == (443, True, b"POST /base")
    assert under.host == b" HTTP/1.1\r\nhost: engine\r\nauthorization: Basic dTpwQA==\r\n"
