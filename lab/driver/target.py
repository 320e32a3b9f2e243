"""The gateway that is driven: its models, its tokenizer and its metrics."""

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvcontrol.core.errors import UNREADABLE
from kvcontrol.traces import Ask, SynthesisError, TokenCount, Words, learn_words
from kvgate.failure import CommandError

LOOK_UP_S = 30.0
_OK = 200
_UNAUTHORIZED = 401
_SHOWN_BYTES = 300


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


async def models_of(session: aiohttp.ClientSession, target: Target) -> list[str]:
    """Return the names of the models that the target serves; raises ``CommandError`` where there is none."""
    said = await _get(session, target, "/v1/models")
    data = said.get("data")
    if isinstance(data, list):
        names = [each["id"] for each in data if isinstance(each, dict) and isinstance(each.get("id"), str)]
        if names:
            return names
    raise CommandError(f"{target.url}/v1/models names no model", "is one of its engines ready?")


async def named_model(session: aiohttp.ClientSession, target: Target) -> str:
    """Return the only model that the target serves; raises ``CommandError`` where there is none, or a choice."""
    names = await models_of(session, target)
    if len(names) == 1:
        return names[0]
    raise CommandError(f"{target.url} serves {', '.join(names)}", "say which with --model NAME")


async def words_of(session: aiohttp.ClientSession, target: Target) -> Words:
    """Learn from the target's ``/tokenize`` what is one token; raises ``CommandError``."""

    async def asked(ask: Ask) -> TokenCount:
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


def _told(said: Any) -> TokenCount | None:
    """What a tokenizer's answer says; None where that is no count of tokens, their spelling, and a context if any."""
    match said:
        case {"count": int(count)} if count >= 0:
            spelled, context = said.get("token_strs") or [], said.get("max_model_len")
            if _is_spelled(spelled) and (context is None or (isinstance(context, int) and context > 0)):
                return TokenCount(count=count, spelled=spelled, context_tokens=context)
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
