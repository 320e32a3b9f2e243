"""Clients that mean no good, or that are slow beyond measure; and what the log never holds."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.fleet import CHAT, Fleet, chat, running_fleet, script

SECRET = "sk-secret-key-of-a-tenant"  # noqa: S105 - it must not be found
PROMPT = "the-prompt-that-nobody-may-read"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One for all tests: whatever one of them does to it, the next is served."""
    state = tmp_path_factory.mktemp("fleet")
    async with running_fleet(state, header_timeout_s=0.5, body_timeout_s=0.6, max_header_bytes=8192) as running:
        yield running


async def connect(fleet: Fleet) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(fleet.gateway.url.rpartition(":")[2]))


async def said(fleet: Fleet, data: bytes) -> bytes:
    """Send bytes and return everything until the gateway closes the connection."""
    reader, writer = await connect(fleet)
    writer.write(data)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1".encode(), b"host: localhost", b"content-type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def is_answered(reader: asyncio.StreamReader) -> None:
    """Read one whole answer of a connection that goes on, and hold it to be a completion."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    assert json.loads(await reader.readexactly(length))["object"] == "chat.completion"


@pytest.mark.parametrize("pieces", [1, 2, 7])
async def test_an_offer_of_another_protocol_is_declined_and_the_request_answered(fleet: Fleet, pieces: int) -> None:
    body = json.dumps(chat()).encode()
    offer = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQCAAAAAAIAAAAA")
    sent = post(body, b"content-length: %d" % len(body), *offer)
    reader, writer = await connect(fleet)
    size = -(-len(sent) // pieces)
    async with asyncio.timeout(20):
        for _ in range(2):  # the connection goes on as what it is
            for start in range(0, len(sent), size):
                writer.write(sent[start : start + size])
                await writer.drain()
                await asyncio.sleep(0.02)
            await is_answered(reader)
    writer.close()


@pytest.mark.parametrize("wait_s", [0.0, 0.05], ids=["at once", "while the first runs"])
async def test_requests_that_come_before_the_answer_of_the_one_before_are_answered_each_by_its_own_body(
    fleet: Fleet, wait_s: float
) -> None:
    texts = [f"pipelined {wait_s} {number}" for number in range(3)]
    bodies = [json.dumps(chat(messages=[{"role": "user", "content": text}])).encode() for text in texts]
    slow = b"x-script: " + script(ttft_s=0.2).encode()
    first, *others = [post(body, b"content-length: %d" % len(body), slow) for body in bodies]
    seen = {name: len(engine.bodies) for name, engine in fleet.engines.items()}
    reader, writer = await connect(fleet)
    writer.write(first)
    if wait_s:
        await writer.drain()
        await asyncio.sleep(wait_s)
    writer.write(b"".join(others))
    async with asyncio.timeout(20):
        for _ in texts:
            await is_answered(reader)
    writer.close()
    came = [body for name, engine in fleet.engines.items() for body in engine.bodies[seen[name] :]]
    assert sorted(came) == sorted(bodies)


@pytest.mark.parametrize("begin", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: "])
async def test_a_head_that_does_not_come_in_time_ends_the_connection(fleet: Fleet, begin: bytes) -> None:
    reader, writer = await connect(fleet)
    writer.write(begin)
    began_s = time.monotonic()
    async with asyncio.timeout(20):
        while not reader.at_eof():
            if begin:
                writer.write(b"a")
            try:
                async with asyncio.timeout(0.1):
                    assert await reader.read(100) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert time.monotonic() - began_s >= 0.4
    writer.close()


async def test_the_second_request_of_a_connection_has_its_time_from_its_own_beginning(fleet: Fleet) -> None:
    reader, writer = await connect(fleet)
    body = json.dumps(chat()).encode()
    for _ in range(3):
        writer.write(post(body, b"content-length: %d" % len(body)))
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
        await asyncio.sleep(0.8)  # longer than a head may take: no request has begun
    writer.write(b"POST /v1")
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_a_body_that_does_not_come_in_time_is_a_408(fleet: Fleet) -> None:
    before = fleet.requests
    answer = await said(fleet, post(b"{", b"content-length: 1000"))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer
    assert fleet.requests == before


async def test_a_body_that_nobody_reads_does_not_hold_its_connection(fleet: Fleet) -> None:
    reader, writer = await connect(fleet)
    writer.write(b"POST /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
    async with asyncio.timeout(30):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 405 ")
    writer.close()


async def test_a_long_answer_is_not_cut_by_the_bounds_on_its_request(fleet: Fleet) -> None:
    async with fleet.gateway.post(CHAT, chat(stream=True), x_script=script(chunks=4, chunk_s=0.5)) as answer:
        assert (await answer.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "lines",
    [[b"x-long: " + b"a" * 10_000], [b"x-%d: %s" % (number, b"a" * 100) for number in range(100)]],
    ids=["one long header", "many headers"],
)
async def test_a_head_that_is_too_long_is_a_431(fleet: Fleet, lines: list[bytes]) -> None:
    answer = await said(fleet, post(b"{}", *lines, b"content-length: 2"))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


async def test_a_url_that_is_too_long_is_a_431(fleet: Fleet) -> None:
    answer = await said(fleet, b"GET /v1/models/" + b"a" * 10_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_header_without_an_end_is_not_collected(fleet: Fleet) -> None:
    reader, writer = await connect(fleet)
    writer.write(b"GET /healthz HTTP/1.1\r\nx-endless: ")
    async with asyncio.timeout(20):
        await asyncio.sleep(0.1)
        writer.write(b"a" * 9000)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_a_long_body_in_one_piece_with_its_head_is_no_long_head(fleet: Fleet) -> None:
    body = json.dumps(chat(padding="x" * 60_000)).encode()
    answer = await said(fleet, post(body, b"content-length: %d" % len(body), b"connection: close"))
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"NOT HTTP\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz\r\nhost: localhost\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_with_an_envelope(fleet: Fleet, garbage: bytes) -> None:
    answer = await said(fleet, garbage)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("version", "hosts", "status"),
    [
        (b"1.1", [b"localhost"], b"200"),
        (b"1.1", [b"[::1]:8000"], b"200"),
        (b"1.1", [b""], b"200"),
        (b"1.1", [], b"400"),
        (b"1.1", [b"x", b"x"], b"400"),
        (b"1.1", [b"x", b"y"], b"400"),
        (b"1.1", [b"x/y"], b"400"),
        (b"1.1", [b"x y"], b"400"),
        (b"1.1", [b"user@x"], b"400"),
        (b"1.0", [], b"200"),
        (b"1.0", [b"x", b"y"], b"400"),
    ],
)
async def test_a_request_names_its_host_exactly_once(
    fleet: Fleet, version: bytes, hosts: list[bytes], status: bytes
) -> None:
    body = json.dumps(chat()).encode()
    lines = [f"POST {CHAT} HTTP/".encode() + version, b"content-length: %d" % len(body), b"connection: close"]
    lines[1:1] = [b"Host: " + host for host in hosts]
    before = fleet.requests
    answer = await said(fleet, b"\r\n".join(lines) + b"\r\n\r\n" + body)
    assert answer[9:12] == status
    assert fleet.requests == before + (status == b"200")
    if status == b"400":
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_host"


@pytest.mark.parametrize("query", [b"a=\xff", b"a=\x7f", b"a=\tb", b"a=\x01", b"a b", b"a\rb", b"a\nb: c"])
async def test_a_query_with_bytes_that_no_address_holds_reaches_no_engine(fleet: Fleet, query: bytes) -> None:
    body = json.dumps(chat()).encode()
    sent = post(body, b"content-length: %d" % len(body), b"connection: close").replace(
        b" HTTP/", b"?" + query + b" HTTP/"
    )
    before = fleet.requests
    answer = await said(fleet, sent)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert fleet.requests == before


@pytest.mark.parametrize(
    "headers",
    [
        (b"content-length: 4", b"transfer-encoding: chunked"),
        (b"transfer-encoding: chunked", b"content-length: 4"),
        (b"content-length: 4", b"content-length: 5"),
        (b"content-length: +4",),
        (b"content-length: 4, 4",),
        (b"transfer-encoding: xchunked",),
        (b"transfer-encoding: chunked, identity",),
        (b"transfer-encoding : chunked",),
        (b" content-length: 4",),
    ],
)
async def test_a_body_of_ambiguous_length_is_refused_and_nothing_of_it_reaches_an_engine(
    fleet: Fleet, headers: tuple[bytes, ...]
) -> None:
    inner = json.dumps(chat()).encode()
    hidden, before = post(inner, b"content-length: %d" % len(inner)), fleet.requests
    answer = await said(fleet, post(b"0\r\n\r\n" + hidden, *headers))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer[9:12] in {b"400", b"408", b"501"}
    assert fleet.requests == before


async def test_a_request_id_with_odd_bytes_is_not_echoed(fleet: Fleet) -> None:
    for odd in ("a b", "a\tb", "é", "x" * 200, "<script>"):
        async with fleet.gateway.post(CHAT, chat(), x_request_id=odd) as answer:
            assert answer.status == 200
            assert odd not in answer.headers["x-request-id"]


async def test_neither_a_prompt_nor_a_key_gets_into_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bodies: list[object] = [
        chat(messages=[{"role": "user", "content": PROMPT}]),
        chat(messages=[{"role": PROMPT, "content": 7}]),
        chat(model=PROMPT),
        b'{"' + PROMPT.encode(),
    ]
    async with running_fleet(tmp_path) as fleet:
        for body in bodies:
            for how in ({}, {"status": 500}, {"die_after": 0}, {"die_after": 1}):
                for stream in (False, True):
                    sent = body if isinstance(body, bytes) else {**body, "stream": stream}  # type: ignore[dict-item]
                    headers = {"authorization": f"Bearer {SECRET}", "x_api_key": SECRET, "x_script": script(**how)}
                    async with fleet.gateway.post(CHAT, sent, **headers) as answer:
                        await answer.read()
        async with fleet.gateway.get(f"/v1/models/{PROMPT}", authorization=f"Bearer {SECRET}") as answer:
            assert answer.status == 404
    lines = [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    assert any("chat_completions" in line for line in lines)
    assert [line for line in lines if SECRET in line or PROMPT in line] == []
