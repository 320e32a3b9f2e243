"""Old and unusual clients: HTTP/1.0, half-closed connections, garbage in a pipeline, clients that never read."""

import asyncio
import json
import socket

from lab.conformance.case import BrokenError, case, need
from lab.conformance.mock import Script
from lab.conformance.rig import CHAT, Rig, body_of

_ANSWER_S = 20.0
_NEVER_READ_S = 90.0
_IDLE_S = 65.0
"""Load balancers keep idle connections for a minute, and use them until then."""


def _request(rig: Rig, script: Script, version: str = "1.1", *, stream: bool = False) -> bytes:
    body = json.dumps(body_of(script, CHAT, {"stream": True} if stream else None)).encode()
    lines = [
        f"POST {CHAT} HTTP/{version}",
        f"Host: {rig.host}:{rig.port}",
        f"Authorization: Bearer {rig.key}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def _until_closed(rig: Rig, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes and return what comes until the target closes the connection."""
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(_ANSWER_S):
            return await reader.read()
    except TimeoutError:
        raise BrokenError(f"the connection was still open after {_ANSWER_S:.0f} s") from None
    finally:
        writer.close()


def _statuses(said: bytes) -> list[int]:
    """The statuses of the final answers, in order."""
    found = [int(each[:3]) for each in said.split(b"HTTP/1.1 ")[1:] if each[:3].isdigit()]
    return [each for each in found if each >= 200]


@case("http-1.0-has-no-chunks", seen="RFC 9112 section 6.1")
async def old(rig: Rig) -> None:
    """A client of HTTP/1.0 gets a stream without chunks, to its end."""
    said = (await _until_closed(rig, _request(rig, rig.script(), "1.0", stream=True))).replace(b"HTTP/1.0", b"HTTP/1.1")
    head, _, body = said.partition(b"\r\n\r\n")
    need(_statuses(head) == [200], f"it begins with {head[:60]!r}")
    need(b"transfer-encoding" not in head.lower(), "it is chunked")
    need(body.startswith(b"data:"), f"its body begins with {body[:20]!r}")
    need(body.rstrip().endswith(b"[DONE]"), f"its body ends with {body[-20:]!r}")


@case("half-closed-client-answered", seen="nginx ignore_client_abort, RFC 9112 section 9.6")
async def half_closed(rig: Rig) -> None:
    """A client that closes its side behind its request gets its whole answer."""
    for stream in (False, True):
        script = rig.script(ttft_s=0.5)
        said = await _until_closed(rig, _request(rig, script, stream=stream), half_close=True)
        need(_statuses(said) == [200], f"{'a stream' if stream else 'an answer'}: it got {said[:60]!r}")
        need(b"tok2" in said, "its answer is not whole")


@case("garbage-keeps-its-place", seen="RFC 9112 section 9.3.2: pipelining")
async def garbage(rig: Rig) -> None:
    """What is no request behind a request takes nothing of the first one's answer."""
    for behind in (b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):
        said = await rig.raw(_request(rig, rig.script(ttft_s=0.5)) + behind)
        statuses = _statuses(said)
        need(statuses[:1] == [200], f"the request was answered with {statuses[:1] or 'nothing'}")
        need(len(statuses) <= 2 and all(400 <= each < 500 for each in statuses[1:]), f"the answers are {statuses}")


@case("client-that-never-reads", seen="slow read attacks, CWE-400", background=True)
async def never_reads(rig: Rig) -> None:
    """A client that takes nothing of an endless stream is given up within 90 s: its backend stops."""
    script = rig.script(chunks=50_000, text="x" * 1000, aside=True)
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0)
        await loop.sock_connect(client, (rig.host, rig.port))
        await loop.sock_sendall(client, _request(rig, script, stream=True))
        need(await rig.until(lambda: rig.seen(script), _ANSWER_S), "no backend got the request")
        gone = await rig.until(lambda: any(each.aborted_s for each in rig.seen(script)), _NEVER_READ_S)
    need(gone, f"its backend was still at work after {_NEVER_READ_S:.0f} s")


@case(
    "idle-connection-kept",
    seen="nginx keepalive_timeout, AWS ALB: 502 behind a server that closes first",
    background=True,
)
async def idle(rig: Rig) -> None:
    """A connection that was idle for 65 s serves another request: a load balancer may still use it."""
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    try:
        for pause_s in (0.0, _IDLE_S):
            await asyncio.sleep(pause_s)
            writer.write(_request(rig, rig.script(aside=True)))
            async with asyncio.timeout(_ANSWER_S):
                head = await reader.readuntil(b"\r\n\r\n")
                need(_statuses(head) == [200], f"after {pause_s:.0f} s it got {head[:60]!r}")
                await reader.readexactly(_length(head))
    except (TimeoutError, EOFError, ConnectionError):
        raise BrokenError("the connection was closed, or did not answer") from None
    finally:
        writer.close()


@case("leave-after-pipelining", seen="-")
async def pipelined(rig: Rig) -> None:
    """A client that had two requests on its way at once and leaves within the second ends its backend's work."""
    first, second = rig.script(ttft_s=0.3), rig.script(chunks=1000, chunk_s=0.1)
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    try:
        writer.write(_request(rig, first) + _request(rig, second, stream=True))
        async with asyncio.timeout(_ANSWER_S):
            head = await reader.readuntil(b"\r\n\r\n")
            need(_statuses(head) == [200], f"the first request got {head[:60]!r}")
            await reader.readexactly(_length(head))
            await reader.readuntil(b"data:")
    except (TimeoutError, EOFError, ConnectionError):
        raise BrokenError("the two requests were not both answered") from None
    finally:
        writer.close()
    gone = await rig.until(lambda: any(each.aborted_s for each in rig.seen(second)), _ANSWER_S)
    need(gone, f"the backend was still at work after {_ANSWER_S:.0f} s")


def _length(head: bytes) -> int:
    """The content length of an answer's head."""
    lines = head.lower().split(b"\r\n")
    return next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)


CASES = (old, half_closed, garbage, never_reads, idle, pipelined)
