"""Contexts that are visited again and again over HTTP: what was answered, and how much of it was cached."""

import json
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from kvcontrol.core.control import CACHE_SALT_HEADER

ANSWER_WITHIN_S = 120.0
_WORDS = ("amber", "bridge", "cedar", "delta", "ember", "fjord", "glacier", "harbour", "island", "juniper", "kelp")


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens`` are the texts of the new tokens, one by one; ``cached`` of ``prompt`` tokens needed no prefill."""

    tokens: tuple[str, ...]
    prompt: int
    cached: int


def context(seed: int, words: int) -> str:
    """Return a text that shares no beginning with another seed's."""
    chooser = random.Random(seed)  # noqa: S311 - words, not secrets
    return f"{seed} " + " ".join(chooser.choice(_WORDS) for _ in range(words))


def ask(url: str, text: str, *, new_tokens: int = 8, salt: str = "", timeout_s: float = ANSWER_WITHIN_S) -> Answer:
    """Send one greedy chat request; raises ``OSError`` when it fails."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": True,
    }
    headers = {"content-type": "application/json"} | ({CACHE_SALT_HEADER: salt} if salt else {})
    request = urllib.request.Request(  # noqa: S310 - our own
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310 - our own
        answer = json.load(response)
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    tokens = tuple(entry["token"] for entry in answer["choices"][0]["logprobs"]["content"])
    return Answer(tokens, int(usage["prompt_tokens"]), int(details.get("cached_tokens", 0)))


def answers(url: str, texts: Sequence[str], *, new_tokens: int = 8) -> list[Answer]:
    """Ask one after the other."""
    return [ask(url, text, new_tokens=new_tokens) for text in texts]


def leave_early(url: str, text: str, after_s: float) -> None:
    """Ask for a stream of 64 tokens and go away when the answer begins, or after so long; ``OSError`` if it can't."""
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 64, "stream": True}
    ).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        client.settimeout(max(after_s, 0.001))
        try:
            client.recv(1 << 16)
        except TimeoutError:
            return


__all__ = ["ANSWER_WITHIN_S", "Answer", "answers", "ask", "context", "leave_early"]
