"""One streamed chat that a benchmark stands on: a whole answer with its text and times, or ``BenchmarkError``."""

from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from kvgate.failure import CommandError
from lab.driver.answer import Answer
from lab.driver.chats import Chats, Message
from lab.driver.target import Target, models_of, now_s

ANSWER_LIMIT_S = 300.0


class BenchmarkError(CommandError):
    """The target gave no usable answer; the message says which request and what came back."""


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
    try:
        return (await models_of(session, Target(url=url, model="", timeout_s=ANSWER_LIMIT_S)))[0]
    except CommandError as error:
        raise BenchmarkError(error.message) from error


async def chat(
    session: aiohttp.ClientSession, target: Target, messages: Sequence[Message], max_tokens: int
) -> TimedAnswer:
    """Send one greedy chat request and stream the answer; raises ``BenchmarkError`` for anything but a whole one."""
    parts: list[str] = []
    answer = Answer(number=0, due_s=now_s())
    await Chats(session, target, now_s).ask(messages, max_tokens, answer, parts.append)
    if not answer.ok:
        raise BenchmarkError(f"{target.url}: {answer.why}" + (f": {answer.detail}" if answer.detail else ""))
    if not parts:
        raise BenchmarkError(f"{target.url} ended its stream without content")
    return TimedAnswer(
        text="".join(parts),
        ttft_s=answer.ttft_s,
        decode_s=answer.last_s - answer.first_s,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        matched_tokens=answer.matched_tokens,
        instance=answer.instance,
    )
