"""Hostile bytes: ambiguous framing, injected lines, endless headers, clients that never finish."""

import asyncio
import contextlib
import json
import time

from lab.conformance.case import case, need
from lab.conformance.rig import CHAT, Rig, body_of

_SLOW_S = 75.0
_SMUGGLED = "/v1/smuggled-request"


def _request(rig: Rig, body: bytes, *lines: str) -> bytes:
    head = [
        f"POST {CHAT} HTTP/1.1",
        f"Host: {rig.host}:{rig.port}",
        f"Authorization: Bearer {rig.key}",
        "Content-Type: application/json",
        *lines,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def _status(answer: bytes) -> int:
    """The status of the first answer, 0 for none."""
    parts = answer.split(b" ", 2)
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


def _smuggled(rig: Rig) -> bool:
    return any(each.path == _SMUGGLED for backend in rig.backends for each in backend.seen)


@case("ambiguous-framing-refused", seen="RFC 9112 section 6.3: request smuggling")
async def framing(rig: Rig) -> None:
    """Content-Length beside Transfer-Encoding, two lengths, or a bad chunk size never yield a second request."""
    hidden = f"POST {_SMUGGLED} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    body = json.dumps(body_of(rig.script(), CHAT)).encode()
    chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    attempts = {
        "length and chunks": _request(
            rig, chunk + hidden, f"Content-Length: {len(chunk)}", "Transfer-Encoding: chunked"
        ),
        "chunks and a short length": _request(rig, chunk + hidden, "Content-Length: 4", "Transfer-Encoding: chunked"),
        "two lengths": _request(
            rig, body + hidden, f"Content-Length: {len(body)}", f"Content-Length: {len(body) + len(hidden)}"
        ),
        "obscured chunks": _request(rig, chunk + hidden, "Transfer-Encoding: xchunked", "Content-Length: 5"),
        "a negative chunk": _request(rig, b"-1\r\n" + body + hidden, "Transfer-Encoding: chunked"),
        "a huge chunk": _request(rig, b"FFFFFFFFFFFFFFFFF\r\n" + body + hidden, "Transfer-Encoding: chunked"),
        "a signed length": _request(rig, body + hidden, f"Content-Length: +{len(body)}"),
    }
    for name, data in attempts.items():
        answer = await rig.raw(data, limit_s=2.0)
        need(not _smuggled(rig), f"{name}: the backend got a request that was hidden in another one")
        statuses = answer.count(b"HTTP/1.1 ")
        need(statuses <= 1 or b" 404 " in answer or b" 400 " in answer, f"{name}: {statuses} answers to one request")
        if name in {"two lengths", "a negative chunk", "a huge chunk", "a signed length"}:
            need(_status(answer) in {0, 400, 413}, f"{name}: answered with {_status(answer)}")


@case("line-breaks-not-injected", seen="CWE-113")
async def injection(rig: Rig) -> None:
    """Line breaks in a path or a request id never become headers, neither towards the client nor the backend."""
    for path in ("/v1/models/x%0d%0aX-Injected:%20yes", "/v1/%0d%0aX-Injected:%20yes"):
        data = (
            f"GET {path} HTTP/1.1\r\nHost: {rig.host}\r\nAuthorization: Bearer {rig.key}\r\nConnection: close\r\n\r\n"
        )
        head = (await rig.raw(data.encode())).partition(b"\r\n\r\n")[0].lower()
        need(b"\nx-injected" not in head, f"{path}: an answer's header was injected")
    script = rig.script()
    body = json.dumps(body_of(script, CHAT)).encode()
    tricky = _request(
        rig, body, "X-Request-Id: a\rX-Injected: yes", f"Content-Length: {len(body)}", "Connection: close"
    )
    head = (await rig.raw(tricky)).partition(b"\r\n\r\n")[0].lower()
    need(b"\nx-injected" not in head and b"\rx-injected" not in head, "a header of the answer was injected")
    seen = rig.seen(script)
    need(not seen or seen[-1].header("x-injected") is None, "a header towards the backend was injected")


@case("endless-headers-refused", seen="-")
async def headers(rig: Rig) -> None:
    """A megabyte of headers is refused, and nobody waits for its end."""
    began_s = time.monotonic()
    for lines in (["X-Long: " + "a" * (1 << 20)], [f"X-{number}: {'a' * 100}" for number in range(10_000)]):
        body = json.dumps(body_of(rig.script(), CHAT)).encode()
        answer = await rig.raw(_request(rig, body, *lines, f"Content-Length: {len(body)}"), limit_s=5)
        need(_status(answer) in {0, 400, 413, 431, 494}, f"answered with {_status(answer)}")
    need(time.monotonic() - began_s < 20, "it took too long")


@case("oversized-length-413", seen="GIE #854")
async def oversized(rig: Rig) -> None:
    """A body that announces 100 GB is refused at once, with an error object where the answer is a 413."""
    began_s = time.monotonic()
    answer = await rig.raw(_request(rig, b'{"model":', "Content-Length: 100000000000"), limit_s=10)
    took_s = time.monotonic() - began_s
    need(_status(answer) in {400, 413}, f"answered with {_status(answer)} after {took_s:.1f} s")
    need(took_s < 10, f"it took {took_s:.1f} s")


@case("slow-headers-cut-off", seen="slow loris", background=True)
async def slow_headers(rig: Rig) -> None:
    """A connection that sends its headers byte by byte, or nothing at all, is closed within 75 s."""
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    silent_reader, silent_writer = await asyncio.open_connection(rig.host, rig.port)
    try:
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: {rig.host}\r\nX-Slow: ".encode())
        dripped = await _closed(reader, writer, b"a")
        need(dripped, "one that sent its headers byte by byte was still open")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(1):
                need(not await silent_reader.read(1), "an answer came to nothing")
    except TimeoutError:
        need(False, "one that sent nothing was still open")  # noqa: FBT003 - the condition that never holds
    finally:
        writer.close()
        silent_writer.close()


@case("slow-body-cut-off", seen="slow loris", background=True)
async def slow_body(rig: Rig) -> None:
    """A client that sends its body byte by byte is answered with 408 or cut off within 75 s."""
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    try:
        writer.write(_request(rig, b"{", "Content-Length: 100000"))
        need(await _closed(reader, writer, b" "), "it was still open")
    finally:
        writer.close()


async def _closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drip: bytes) -> bool:
    """Drip bytes until the other side answers or closes; False when it never does."""
    ends_s = time.monotonic() + _SLOW_S
    while time.monotonic() < ends_s:
        try:
            writer.write(drip)
            await writer.drain()
            async with asyncio.timeout(1.0):
                await reader.read(4096)
        except TimeoutError:
            continue
        except ConnectionError:
            return True
        return True
    return False


CASES = (framing, injection, headers, oversized, slow_headers, slow_body)
