"""A streamed chat counts as answered when its stream is whole and reports no failure, whatever its text says."""

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lab.bench.timed_chat import BenchmarkError
from lab.bench.timed_chat import chat as timed
from lab.driver.answer import Answer, Ending
from lab.driver.chats import Chats
from lab.driver.target import Target
from tests.support.serving import serving

MESSAGES = [{"role": "user", "content": "a question"}]
WORD = {"choices": [{"delta": {"content": "error"}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def streaming(*events: Any, done: bool = True) -> web.Application:
    async def chat(_: web.Request) -> web.Response:
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=text + ("data: [DONE]\n\n" if done else ""), content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    return app


async def asked(url: str) -> tuple[Answer, list[str]]:
    answer, kept = Answer(number=0, due_s=0.0), list[str]()
    async with aiohttp.ClientSession() as session:
        chats = Chats(session, Target(url=url, model="m", timeout_s=60.0), lambda: 1.0)
        await chats.ask(MESSAGES, 1, answer, kept.append)
    return answer, kept


async def test_a_whole_answer_is_kept_without_what_the_model_reasons() -> None:
    reasons = {"choices": [{"delta": {"reasoning_content": "hmm"}}]}
    async with serving(streaming(reasons, WORD, USAGE)) as url:
        answer, kept = await asked(url)
    assert answer.ok
    assert (kept, len(answer.gaps_s), answer.why) == (["error"], 1, "")


@pytest.mark.parametrize(
    ("events", "done", "why"),
    [
        ([WORD, {"error": {"message": "instance died", "code": "gone"}}], False, "error in the stream gone"),
        ([WORD, {"choices": [{"delta": {}, "finish_reason": "error"}]}, USAGE], True, "answer ended with error"),
        ([WORD, {"choices": [{"delta": {}, "finish_reason": "abort"}]}, USAGE], True, "answer ended with abort"),
        ([WORD, USAGE], False, "stream cut off"),
        ([WORD], True, "no usage told"),
        ([[1]], True, "unreadable answer"),
        ([{"choices": [{"delta": {"content": 5}}]}], True, "unreadable answer"),
        ([USAGE], True, "empty answer"),
    ],
)
async def test_a_failure_has_one_name_in_runs_and_ends_a_benchmark(events: list[Any], done: bool, why: str) -> None:  # noqa: FBT001
    async with serving(streaming(*events, done=done)) as url:
        answer, _ = await asked(url)
        assert (answer.ending, answer.why) == (Ending.FAILED, why)
        async with aiohttp.ClientSession() as session:
            with pytest.raises(BenchmarkError, match=f"{url}: {why}"):
                await timed(session, Target(url=url, model="m", timeout_s=60.0), MESSAGES, 1)


async def test_a_benchmark_needs_text_where_a_run_needs_tokens_alone() -> None:
    silent = {"choices": [{"delta": {"content": ""}}]}
    async with serving(streaming(silent, USAGE)) as url:
        answer, kept = await asked(url)
        assert (answer.ok, kept) == (True, [])
        async with aiohttp.ClientSession() as session:
            with pytest.raises(BenchmarkError, match="without content"):
                await timed(session, Target(url=url, model="m", timeout_s=60.0), MESSAGES, 1)
