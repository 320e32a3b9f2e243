"""The gateway that is driven: its models, its tokenizer, its metrics, and streamed chats with it."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvcontrol.core.errors import UNREADABLE
from kvcontrol.traces import Ask, SynthesisError, Told, UsageError, Words, header_tokens, learn_words, used
from kvgate.failure import CommandError
from lab.driver.answer import Answer, Ending

LOOK_UP_S = 30.0
_OK = 200
_UNAUTHORIZED = 401
_SHED = (429, 503)
_SHOWN_BYTES = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where it is, what model to ask it for, and how long an answer may take."""

    url: str
    model: str
    timeout_s: float
    api_key: str | None = None
    metrics_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        key = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return {"content-type": "application/json", **key}


@contextmanager
def foreign_errors(url: str) -> Iterator[None]:
    """The one place where other libraries' errors on the way to a target become ours."""
    try:
        yield
    except TimeoutError as error:
        raise CommandError(f"{url} did not answer within {LOOK_UP_S:.0f} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise CommandError(f"{url}: {error}", "is the gateway running there? kvgate up starts one") from error
    except UNREADABLE as error:
        raise CommandError(f"{url} answers what can't be read: {error}", "is that an OpenAI-compatible API?") from error


async def named_model(session: aiohttp.ClientSession, target: Target) -> str:
    """Return the only model that the target serves; raises ``CommandError`` where there is none, or a choice."""
    said = await _get(session, target, "/v1/models")
    names = [each["id"] for each in said.get("data", ()) if isinstance(each, dict) and isinstance(each.get("id"), str)]
    match names:
        case [only]:
            return str(only)
        case []:
            raise CommandError(f"{target.url}/v1/models names no model", "is one of its engines ready?")
    raise CommandError(f"{target.url} serves {', '.join(names)}", "say which with --model NAME")


async def words_of(session: aiohttp.ClientSession, target: Target) -> Words:
    """Learn from the target's ``/tokenize`` what is one token; raises ``CommandError``."""

    async def asked(ask: Ask) -> Told:
        body: dict[str, object] = {"model": target.model}
        if ask.as_message:
            body["messages"] = [{"role": "user", "content": ask.text}]
        else:
            body |= {"prompt": ask.text, "add_special_tokens": False, "return_token_strs": True}
        url = f"{target.url}/tokenize"
        with foreign_errors(url):
            async with (
                asyncio.timeout(LOOK_UP_S),
                session.post(url, data=msgspec.json.encode(body), headers=target.headers) as response,
            ):
                text = await response.read()
                if response.status != _OK:
                    raise CommandError(
                        f"{url} answers {response.status}: {_shown(text)}",
                        "--tokenizer DIR takes the tokenizer from a model folder instead",
                    )
                said = msgspec.json.decode(text)
        if (told := _told(said)) is not None:
            return told
        raise CommandError(f"{url} tells no count: {_shown(text)}", "--tokenizer DIR takes it from a model folder")

    learning = learn_words()
    try:
        ask = next(learning)
        while True:
            ask = learning.send(await asked(ask))
    except StopIteration as done:
        learned: Words = done.value
        return learned
    except SynthesisError as error:
        raise CommandError(f"{target.url}/tokenize: {error}") from error


async def usable_instances(session: aiohttp.ClientSession, target: Target) -> int | None:
    """Return how many instances a gateway of ours can use, None for another's."""
    try:
        said = await _get(session, target, "/readyz")
    except CommandError:
        return None
    usable = said.get("usable")
    return usable if isinstance(usable, int) and not isinstance(usable, bool) and usable >= 0 else None


async def tier_tokens(session: aiohttp.ClientSession, target: Target) -> dict[str, float] | None:
    """Return what our gateway's metrics say was found, by tier, since it started; empty for another's gateway, None
    where they ask for another key.
    """
    prefix = "kvgate_matched_tier_tokens_total{"
    headers = {} if target.metrics_key is None else {"authorization": f"Bearer {target.metrics_key}"}
    with foreign_errors(target.url):
        async with asyncio.timeout(LOOK_UP_S), session.get(f"{target.url}/metrics", headers=headers) as response:
            text = (await response.read()).decode() if response.status == _OK else ""
            if response.status == _UNAUTHORIZED:
                return None
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(prefix) and 'tier="' in line:
            tier = line.partition('tier="')[2].partition('"')[0]
            found[tier] = found.get(tier, 0.0) + _tokens_of(line.rpartition(" ")[2], target.url)
    return found


async def _get(session: aiohttp.ClientSession, target: Target, path: str) -> dict[str, Any]:
    url = f"{target.url}{path}"
    with foreign_errors(url):
        async with asyncio.timeout(LOOK_UP_S), session.get(url, headers=target.headers) as response:
            text = await response.read()
            if response.status in {401, 403}:
                raise CommandError(f"{url} answers {response.status}: {_shown(text)}", "give a key with --api-key")
            said = msgspec.json.decode(text)
    return said if isinstance(said, dict) else {}


class Chats:
    """Asks one target over kept connections, and fills in answers; ``clock`` counts from the run's beginning."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, clock: Callable[[], float]) -> None:
        self._session = session
        self._target = target
        self._url = f"{target.url}/v1/chat/completions"
        self._headers = target.headers
        self._clock = clock

    async def ask(self, content: str, output_tokens: int, answer: Answer) -> None:
        """Send one request; whatever comes of it stands in ``answer``. Raises nothing but ``CancelledError``."""
        body = msgspec.json.encode(
            {
                "model": self._target.model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        answer.sent_s = self._clock()
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._streamed(body, answer)
        except TimeoutError:
            answer.ending, answer.why = Ending.FAILED, "timeout"
        except aiohttp.ClientConnectorError:
            answer.ending, answer.why = Ending.FAILED, "no connection"
        except (aiohttp.ClientError, OSError):
            answer.ending, answer.why = Ending.FAILED, "connection lost"
        except UNREADABLE:
            answer.ending, answer.why = Ending.FAILED, "unreadable answer"
        finally:
            answer.ended_s = self._clock()

    async def _streamed(self, body: bytes, answer: Answer) -> None:
        async with self._session.post(self._url, data=body, headers=self._headers) as response:
            headers = response.headers
            answer.instance = headers.get("x-kvgate-instance", "")
            answer.matched_tokens = header_tokens(headers.get("x-kvgate-matched-tokens", "0"))
            if response.status != _OK:
                answer.ending = Ending.SHED if response.status in _SHED else Ending.FAILED
                answer.why = f"{response.status} {_code(await response.read())}".rstrip()
                return
            reading = _Reading(answer)
            async for piece in response.content.iter_any():
                reading.take(piece, self._clock())
        reading.settle()


class _Reading:
    """The stream of one answer, as it comes."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self._done = False
        self._usage: Any = None
        self._error = ""
        self._spoke_s = 0.0

    def take(self, piece: bytes, now_s: float) -> None:
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self._done = True
                else:
                    self._event(_decode_event(data), now_s)

    def _event(self, event: _Event, now_s: float) -> None:
        answer = self._answer
        if event.error is not None:
            self._error = _code_of(event.error)
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices or ():
            delta = choice.delta
            self._spoke_s = now_s
            if delta is not None and (delta.content or delta.reasoning_content):
                if answer.first_s:
                    answer.gaps_s.append(now_s - answer.last_s)
                else:
                    answer.first_s = now_s
                answer.last_s = now_s

    def settle(self) -> None:
        answer, lie = self._answer, ""
        if self._usage is not None:
            try:
                answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens = used(self._usage)
            except UsageError as error:
                lie = str(error)
        answer.ending = Ending.FAILED
        if self._error:
            answer.why = f"error in the stream {self._error}"
        elif not self._done:
            answer.why = "stream cut off"
        elif self._usage is None:
            answer.why = "no usage told"
        elif lie:
            answer.why = f"unreadable answer: {lie}"
        elif not self._spoke_s:
            answer.why = "empty answer"
        else:
            if not answer.first_s:  # its tokens have no text: half a character, or special ones
                answer.first_s = answer.last_s = self._spoke_s
            answer.ending = Ending.OK


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


def _told(said: Any) -> Told | None:
    """What a tokenizer's answer says; None where that is no count of tokens, their spelling, and a context if any."""
    match said:
        case {"count": int(count)} if count >= 0:
            spelled, context = said.get("token_strs") or [], said.get("max_model_len")
            if _is_spelled(spelled) and (context is None or (isinstance(context, int) and context > 0)):
                return Told(count=count, spelled=spelled, context_tokens=context)
    return None


def _is_spelled(said: Any) -> bool:
    return isinstance(said, list) and all(isinstance(each, str) for each in said)


def _tokens_of(text: str, url: str) -> float:
    try:
        tokens = float(text)
    except ValueError:
        tokens = math.nan
    if not 0 <= tokens < math.inf:
        raise CommandError(f"{url}/metrics says {text[:_SHOWN_BYTES]!r} of a tier, which is no number of tokens")
    return tokens


def _shown(body: bytes) -> str:
    return body[:_SHOWN_BYTES].decode(errors="replace").strip() or "nothing"


def now_s() -> float:
    """Return the clock that runs are timed by."""
    return time.perf_counter()


__all__ = [
    "LOOK_UP_S",
    "Chats",
    "Target",
    "foreign_errors",
    "named_model",
    "now_s",
    "tier_tokens",
    "usable_instances",
    "words_of",
]
