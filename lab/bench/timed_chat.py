"""One streamed chat request, timed: when the first token came, how fast the rest, what the gateway said about it."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import msgspec

from kvcontrol.core.errors import UNREADABLE
from kvcontrol.traces import UsageError, header_tokens, used

Message = dict[str, str]

_LOOK_UP_S = 10.0
_SHOWN_BYTES = 300
_FAILED = frozenset({"error", "abort"})
"""Reasons for an answer's end that only LMDeploy gives, where its engine failed."""


class BenchmarkError(RuntimeError):
    """The target gave no usable answer; the message says which request and what came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A gateway, the model to ask it for, and how long one answer may take."""

    url: str
    model: str
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """``ttft_s`` runs from sending to the first content token; ``decode_s`` from the first to the last one.

    ``cached_tokens`` is what the engine reports in ``usage``; ``matched_tokens`` what the gateway predicted.
    """

    text: str
    ttft_s: float
    decode_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    matched_tokens: int
    instance: str

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first a second; 0.0 where there was only one."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the id of the first model that the target serves; raises ``BenchmarkError`` when it names none."""
    with _foreign_errors(url):
        async with asyncio.timeout(_LOOK_UP_S), session.get(f"{url}/v1/models") as response:
            body = msgspec.json.decode(await response.read())
    match body:
        case {"data": [{"id": str() as model}, *_]}:
            return model
    raise BenchmarkError(f"{url}/v1/models names no model: {body!r}")


async def chat(
    session: aiohttp.ClientSession, target: Target, messages: Sequence[Message], max_tokens: int
) -> TimedAnswer:
    """Send one greedy chat request and stream the answer; raises ``BenchmarkError`` for anything but a whole one."""
    body = msgspec.json.encode(
        {
            "model": target.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    )
    with _foreign_errors(target.url):
        return await _streamed(session, target, body)


async def _streamed(session: aiohttp.ClientSession, target: Target, body: bytes) -> TimedAnswer:
    started = time.perf_counter()
    async with (
        asyncio.timeout(target.timeout_s),
        session.post(
            f"{target.url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        ) as response,
    ):
        if response.status != 200:  # noqa: PLR2004 - the one status that streams
            raise BenchmarkError(f"{target.url} answered {response.status}: {(await response.text())[:500]}")
        first_at = last_at = 0.0
        parts: list[str] = []
        usage: object = None
        async for line in response.content:
            event = read_event(line, target.url)
            if event is None:
                continue
            for piece in _pieces(event, target.url):
                last_at = time.perf_counter()
                first_at = first_at or last_at
                parts.append(piece)
            usage = event.get("usage") or usage
        headers = response.headers
    if not first_at or not usage:
        raise BenchmarkError(f"{target.url} ended its stream without {'content' if usage else 'usage'}")
    try:
        told = used(usage)
    except UsageError as error:
        raise BenchmarkError(f"{target.url} tells a usage that can't be true: {error}") from error
    return TimedAnswer(
        text="".join(parts),
        ttft_s=first_at - started,
        decode_s=last_at - first_at,
        prompt_tokens=told.prompt_tokens,
        completion_tokens=told.completion_tokens,
        cached_tokens=told.cached_tokens,
        matched_tokens=header_tokens(headers.get("x-kvgate-matched-tokens", "0")),
        instance=headers.get("x-kvgate-instance", ""),
    )


def read_event(line: bytes, url: str) -> dict[str, Any] | None:
    """Return the object in a line of a stream, None where it holds none (also ``[DONE]``); raises ``BenchmarkError``
    where it says that the answer failed.

    It is the event's shape that says so, an error of its own or a choice that ended in one: its text may say anything.
    """
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return None
    try:
        event = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise BenchmarkError(f"{url} streamed what is no JSON: {data[:_SHOWN_BYTES]!r}") from error
    match event:
        case {"error": found} if found is not None:
            raise BenchmarkError(f"{url} failed mid-stream: {found}")
        case {"choices": list() as choices}:
            for choice in choices:
                if isinstance(choice, dict) and choice.get("finish_reason") in _FAILED:
                    raise BenchmarkError(f"{url} ended an answer with {choice['finish_reason']!r}")
        case dict():
            pass
        case _:
            raise BenchmarkError(f"{url} streamed what is no event: {data[:_SHOWN_BYTES]!r}")
    return cast("dict[str, Any]", event)


@contextmanager
def _foreign_errors(url: str) -> Iterator[None]:
    """The one place where other libraries' errors become ours."""
    try:
        yield
    except TimeoutError as error:
        raise BenchmarkError(f"{url} did not answer in time") from error
    except (aiohttp.ClientError, *UNREADABLE) as error:
        raise BenchmarkError(f"{url}: {error}") from error


def _pieces(event: dict[str, Any], url: str) -> Iterator[str]:
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        match choice:
            case {"delta": {"content": str(piece)}}:
                if piece:
                    yield piece
            case {"delta": {"content": None}} | {"delta": None}:
                pass
            case {"delta": {"content": _}}:
                raise BenchmarkError(f"{url} streamed a text that is none")
            case _:
                pass


__all__ = ["BenchmarkError", "Message", "Target", "TimedAnswer", "chat", "first_model", "read_event"]
