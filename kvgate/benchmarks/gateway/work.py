"""The work that a gateway is given: bodies of a size, sent by so many clients at once."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from kvgate.benchmarks.gateway.backend import MODEL
from kvgate.benchmarks.gateway.subject import Subject
from kvgate.benchmarks.timed_chat import BenchmarkError

CHAT = "/v1/chat/completions"
_HEADERS = {"content-type": "application/json"}
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "in")]
_HOT = 64


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bodies to send: ``hot`` ones come again and again, ``cold`` ones once; so of ten requests ``cold_of_ten``."""

    hot: Sequence[bytes]
    cold: Sequence[bytes]
    cold_of_ten: int

    def body(self, number: int) -> bytes:
        if number % 10 < self.cold_of_ten:
            return self.cold[number // 10 * self.cold_of_ten + number % 10]
        return self.hot[number * 7 % len(self.hot)]


def corpus(size_bytes: int, *, requests: int, cold_of_ten: int, seed: int) -> Corpus:
    """Return bodies of about this size: chats of made-up words."""
    chance = random.Random(seed)  # noqa: S311 - texts, no secrets
    cold = (requests // 10 + 1) * cold_of_ten
    return Corpus(
        hot=[chat(text(chance, size_bytes)) for _ in range(_HOT)],
        cold=[chat(text(chance, size_bytes)) for _ in range(cold)],
        cold_of_ten=cold_of_ten,
    )


def text(chance: random.Random, size_bytes: int) -> str:
    """Return made-up words of about so many bytes."""
    words = ["".join(chance.choices(_SYLLABLES, k=3)) for _ in range(64)]
    parts: list[str] = []
    length = 0
    while length < size_bytes:
        part = " ".join(chance.choices(words, k=32))
        parts.append(part)
        length += len(part) + 1
    return " ".join(parts)[:size_bytes]


def chat(content: str, *, stream: bool = False) -> bytes:
    """Return a chat request's body."""
    said: dict[str, object] = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 16}
    if stream:
        said["stream"] = True
    return json.dumps(said, separators=(",", ":")).encode()


def session() -> aiohttp.ClientSession:
    """Return a client without limits of its own."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))


async def whole(subject: Subject, bodies: Corpus, *, requests: int, clients: int) -> float:
    """Send so many requests; return the gateway's processor time for each, in microseconds."""
    async with session() as client:
        numbers = iter(range(requests))

        async def one() -> None:
            for number in numbers:
                await _ask(client, subject.url, bodies.body(number))

        before_s = subject.cpu_s()
        await asyncio.gather(*(one() for _ in range(clients)))
        return (subject.cpu_s() - before_s) / requests * 1e6


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
                    if not data.endswith(b"data: [DONE]\n\n") or data.count(b'"delta"') != chunks:
                        raise BenchmarkError(f"a stream of {chunks} pieces had {data.count(b'delta')}")

        before_s = subject.cpu_s()
        await asyncio.gather(*(one() for _ in range(clients)))
        return (subject.cpu_s() - before_s) / (streams * chunks) * 1e6


async def _ask(client: aiohttp.ClientSession, url: str, body: bytes) -> None:
    async with client.post(url + CHAT, data=body, headers=_HEADERS) as answer:
        data = await answer.read()
        if answer.status != 200:  # noqa: PLR2004 - the one status that counts
            raise BenchmarkError(f"{url} answered {answer.status}: {data[:200]!r}")


__all__ = ["Corpus", "chat", "corpus", "latencies", "streamed", "whole"]
