"""The work that a gateway is given: requests sent by so many clients at once, whole, in turns, or as streams."""

import asyncio
import random
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import aiohttp

from lab.bench.gateway.corpus import Ask, chat
from lab.bench.gateway.placement import Placed
from lab.bench.gateway.subject import Subject
from lab.bench.timed_chat import BenchmarkError

CHAT = "/v1/chat/completions"
_HEADERS = {"content-type": "application/json"}
_BACKEND = re.compile(rb'"content":\s*"on-(\d+)"')


_Send = Callable[[Ask], Awaitable[None]]


class Served(NamedTuple):
    """The gateway's processor time for each request, in microseconds, and where each went, in the order of the ends."""

    cpu_us: float
    placed: Sequence[Placed]


def session() -> aiohttp.ClientSession:
    """Return a client without limits of its own."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))


async def whole(subject: Subject, asks: Sequence[Ask], *, clients: int) -> Served:
    """Send these in their order, ``clients`` at once."""
    left = iter(asks)

    async def one(send: _Send) -> None:
        for ask in left:
            await send(ask)

    return await _served(subject, [one] * clients)


async def in_turns(subject: Subject, chats: Sequence[Sequence[Ask]], *, clients: int, chance: random.Random) -> Served:
    """Send chats, ``clients`` at once: within one each turn waits for the answer of the one before.

    Whoever is free takes any one's next turn: if each client stayed with a chat to its end they would go in step, and
    who merely takes turns would send every chat where it went before. So there have to be several chats for a client.
    """
    ready = [deque(each) for each in chats]

    async def one(send: _Send) -> None:
        while ready:
            turns = ready.pop(chance.randrange(len(ready)))
            await send(turns.popleft())
            if turns:
                ready.append(turns)

    return await _served(subject, [one] * clients)


async def _served(subject: Subject, clients: Sequence[Callable[[_Send], Awaitable[None]]]) -> Served:
    placed: list[Placed] = []
    async with session() as client:

        async def send(ask: Ask) -> None:
            backend = await _ask(client, subject.url, ask.body)
            placed.append(Placed(ask.key, backend))

        before_s = subject.cpu_s()
        await asyncio.gather(*(each(send) for each in clients))
        return Served((subject.cpu_s() - before_s) / max(1, len(placed)) * 1e6, placed)


async def latencies(url: str, body: bytes, *, requests: int) -> list[float]:
    """Send requests one after the other; return how long each took, in microseconds, in ascending order."""
    took: list[float] = []
    async with session() as client:
        for _ in range(requests):
            began_s = time.perf_counter()
            await _ask(client, url, body)
            took.append((time.perf_counter() - began_s) * 1e6)
    return sorted(took)


async def streamed(subject: Subject, *, clients: int, streams: int, chunks: int) -> float:
    """Read so many streams; return the gateway's processor time for each piece, in microseconds."""
    body = chat("a short prompt for a long answer", stream=True)
    async with session() as client:
        numbers = iter(range(streams))

        async def one() -> None:
            for _ in numbers:
                async with client.post(subject.url + CHAT, data=body, headers=_HEADERS) as answer:
                    data = await answer.read()
                    pieces = data.count(b'" token"')
                    if not data.rstrip().endswith(b"data: [DONE]") or pieces != chunks:
                        raise BenchmarkError(f"a stream of {chunks} pieces had {pieces}, and ended {data[-40:]!r}")

        before_s = subject.cpu_s()
        await asyncio.gather(*(one() for _ in range(clients)))
        return (subject.cpu_s() - before_s) / (streams * chunks) * 1e6


async def _ask(client: aiohttp.ClientSession, url: str, body: bytes) -> str:
    """Send one request and return the backend that answered it."""
    async with client.post(url + CHAT, data=body, headers=_HEADERS) as answer:
        data = await answer.read()
        found = _BACKEND.search(data)
        if answer.status != 200 or found is None:  # noqa: PLR2004 - the one status that counts
            raise BenchmarkError(f"{url} answered {answer.status}: {data[:200]!r}")
        return found[1].decode()
