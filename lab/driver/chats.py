"""Streamed chats with one target, timed: the one client behind replays, live studies and benchmarks of chats."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from kvcontrol.core.errors import UNREADABLE
from kvcontrol.traces import UsageError, header_tokens, used
from lab.driver.answer import Answer, Ending
from lab.driver.stream import StreamEvent, StreamReader
from lab.driver.target import Target

Message = dict[str, str]

_OK = 200
_SHED = (429, 503)
_SHOWN_BYTES = 300


class Chats:
    """Asks one target over kept connections, and fills in answers; ``clock`` counts from the run's beginning."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, clock: Callable[[], float]) -> None:
        self._session = session
        self._target = target
        self._url = f"{target.url}/v1/chat/completions"
        self._headers = target.headers
        self._clock = clock

    async def ask(
        self, messages: Sequence[Message], output_tokens: int, answer: Answer, keep: Callable[[str], None] | None = None
    ) -> None:
        """Send one request; whatever comes of it stands in ``answer``. Raises nothing but ``CancelledError``.

        ``keep`` takes each part of the text, without what a model reasons: runs of many requests have no use for it.
        """
        body = msgspec.json.encode(
            {
                "model": self._target.model,
                "messages": messages,
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        answer.asked_tokens = output_tokens
        answer.sent_s = self._clock()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._streamed(body, answer, keep)
        except TimeoutError:
            _fail(answer, "timeout")
        except aiohttp.ClientConnectorError:
            _fail(answer, "no connection")
        except (aiohttp.ClientError, OSError):
            _fail(answer, "connection lost")
        except UNREADABLE:
            _fail(answer, "unreadable answer")
        finally:
            answer.ended_s = self._clock()

    async def _streamed(self, body: bytes, answer: Answer, keep: Callable[[str], None] | None) -> None:
        async with self._session.post(self._url, data=body, headers=self._headers) as response:
            headers = response.headers
            answer.instance = headers.get("x-kvgate-instance", "")
            answer.matched_tokens = header_tokens(headers.get("x-kvgate-matched-tokens", "0"))
            if response.status != _OK:
                answer.ending = Ending.SHED if response.status in _SHED else Ending.FAILED
                answer.why = str(response.status)
                text = await response.read()
                answer.why = f"{response.status} {_code(text)}".rstrip()
                answer.detail = text[:_SHOWN_BYTES].decode(errors="replace")
                return
            reading = _Reading(answer, keep)
            async for received in response.content.iter_any():
                reading.take(received, self._clock())
        reading.settle()


class _Reading:
    """The stream of one answer, as it comes."""

    def __init__(self, answer: Answer, keep: Callable[[str], None] | None) -> None:
        self._answer = answer
        self._keep = keep
        self._stream = StreamReader()
        self._usage: Any = None

    def take(self, received: bytes, now_s: float) -> None:
        for event in self._stream.events(received):
            self._event(event, now_s)

    def _event(self, event: StreamEvent, now_s: float) -> None:
        answer = self._answer
        if event.error is not None:
            _fail(answer, f"error in the stream {_code_of(event.error)}".rstrip())
            answer.detail = answer.detail or str(event.error)[:_SHOWN_BYTES]
        elif failed := event.failed_with:
            _fail(answer, f"answer ended with {failed}")
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices or ():
            if answer.first_s and not choice.text and choice.finish_reason is not None:
                continue  # it only ends the answer
            if answer.first_s:
                answer.gaps_s.append(now_s - answer.last_s)
            else:
                answer.first_s = now_s
            answer.last_s = now_s
            if self._keep is not None and choice.delta is not None and choice.delta.content:
                self._keep(choice.delta.content)

    def settle(self) -> None:
        answer, lie = self._answer, ""
        if self._usage is not None:
            try:
                answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens = used(self._usage)
            except UsageError as error:
                lie = str(error)
        if answer.why:
            return
        if not self._stream.done:
            _fail(answer, "stream cut off")
        elif self._usage is None:
            _fail(answer, "no usage told")
        elif lie:
            _fail(answer, f"unreadable answer: {lie}")
        elif not answer.first_s:
            _fail(answer, "empty answer")
        else:
            answer.ending = Ending.OK


def _fail(answer: Answer, why: str) -> None:
    """Note a failure; the first one is the cause of those after it."""
    if not answer.why:
        answer.ending, answer.why = Ending.FAILED, why


def _code(body: bytes) -> str:
    try:
        said = msgspec.json.decode(body)
    except UNREADABLE:
        return ""
    return _code_of(said.get("error") if isinstance(said, dict) else None)


def _code_of(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "")
    return ""
