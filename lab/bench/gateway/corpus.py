"""What gateways are sent: chats of made-up words whose beginnings come again, or don't.

| corpus | is |
|---|---|
| hot | 64 prompts, again and again, never in the same order |
| cold | each prompt once |
| mixed | nine of ten hot, one cold |
| shared | eight long beginnings (seven eighths of the prompt), each with an end of its own every time |
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from lab.bench.gateway.backend import MODEL

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "in")]
_HOT: Final = 64
_SHARED: Final = 8
_EIGHTHS: Final = 7


class Ask(NamedTuple):
    """A request's body, and what it belongs to: requests of one key are best served by one instance."""

    body: bytes
    key: str = ""


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


def chat(*contents: str, stream: bool = False) -> bytes:
    """Return a chat request's body; the messages are the user's and the assistant's in turn."""
    messages = [{"role": ("user", "assistant")[place % 2], "content": each} for place, each in enumerate(contents)]
    said: dict[str, object] = {"model": MODEL, "messages": messages, "max_tokens": 16}
    if stream:
        said["stream"] = True
    return json.dumps(said, separators=(",", ":")).encode()


def hot(chance: random.Random, size_bytes: int, requests: int) -> Sequence[Ask]:
    """Return requests for 64 prompts, all of them in every round, each round in an order of its own: in one that comes
    again, who merely takes turns sends every prompt where it went before.
    """
    prompts = [Ask(chat(text(chance, size_bytes)), f"hot-{each}") for each in range(_HOT)]
    rounds = (chance.sample(prompts, _HOT) for _ in range(-(-requests // _HOT)))
    return list(chain.from_iterable(rounds))[:requests]


def cold(chance: random.Random, size_bytes: int, requests: int) -> Sequence[Ask]:
    """Return requests of which each has a prompt of its own."""
    return [Ask(chat(text(chance, size_bytes))) for _ in range(requests)]


def mixed(chance: random.Random, size_bytes: int, requests: int) -> Sequence[Ask]:
    """Return requests of which the first of each ten has a prompt of its own."""
    asks = list(hot(chance, size_bytes, requests))
    for number in range(0, requests, 10):
        asks[number] = Ask(chat(text(chance, size_bytes)))
    return asks


def shared(chance: random.Random, size_bytes: int, requests: int) -> Sequence[Ask]:
    """Return requests with eight beginnings. No keys: what everybody has may well be at several instances."""
    beginnings = [text(chance, size_bytes * _EIGHTHS // 8) for _ in range(_SHARED)]
    return [Ask(chat(f"{beginnings[number % _SHARED]} {text(chance, size_bytes // 8)}")) for number in range(requests)]


def conversations(chance: random.Random, *, sessions: int, turns: int, turn_bytes: int) -> Sequence[Sequence[Ask]]:
    """Return chats, each as its turns: every one repeats all that was said before."""
    made = []
    for number in range(sessions):
        said = [text(chance, turn_bytes * 3)]
        asks = [Ask(chat(*said), f"session-{number}")]
        for _ in range(turns - 1):
            said += ["yes", text(chance, turn_bytes)]
            asks.append(Ask(chat(*said), f"session-{number}"))
        made.append(asks)
    return made


CORPORA: Mapping[str, Callable[[random.Random, int, int], Sequence[Ask]]] = {
    "hot": hot,
    "cold": cold,
    "mixed": mixed,
    "shared": shared,
}
