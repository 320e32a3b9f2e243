"""Whatever a target says of its tokens, nothing that can't be true gets into a report: every client of it fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvcontrol.traces import UsageError, used
from kvgate.failure import CommandError
from lab.bench import timed_chat
from lab.bench.timed_chat import BenchmarkError
from lab.driver.answer import Answer, Ending
from lab.driver.chats import Chats
from lab.driver.target import Target, tier_tokens, usable_instances, words_of
from loadtests.exchange import Client
from tests.support.serving import serving

SHOWN = web.AppKey("shown", dict[str, Any])
LIES = [
    {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": -5}},
    {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 11}},
    {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 10**30}},
    {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": [5]},
    {"prompt_tokens": -10, "completion_tokens": 1},
    {"prompt_tokens": 10**30, "completion_tokens": 1},
    {"prompt_tokens": 10, "completion_tokens": -1},
    {"prompt_tokens": 10, "completion_tokens": True},
    {"prompt_tokens": "10", "completion_tokens": 1},
    {"prompt_tokens": 10.5, "completion_tokens": 1},
    [10, 1],
]


async def chat(request: web.Request) -> web.Response:
    events = [{"choices": [{"delta": {"content": "word"}}]}, {"choices": [], "usage": request.app[SHOWN]["usage"]}]
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    headers = {"x-kvgate-matched-tokens": "9" * 5000}
    return web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream", headers=headers)


async def shown(request: web.Request) -> web.Response:
    return web.Response(text=request.app[SHOWN][request.path])


@pytest.fixture
async def target() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    app = web.Application()
    app[SHOWN] = {}
    app.add_routes([web.post("/v1/chat/completions", chat), web.post("/tokenize", shown)])
    app.add_routes([web.get(path, shown) for path in ("/metrics", "/readyz")])
    async with serving(app) as url:
        yield url, app[SHOWN]


async def asked(url: str) -> Answer:
    async with aiohttp.ClientSession() as session:
        answer = Answer(number=0, due_s=0.0)
        await Chats(session, Target(url=url, model="m", timeout_s=60.0), lambda: 1.0).ask(
            [{"role": "user", "content": "text"}], 1, answer
        )
    return answer


@pytest.mark.parametrize("usage", LIES)
async def test_a_usage_that_can_not_be_true_is_an_unreadable_answer(
    target: tuple[str, dict[str, Any]], usage: object
) -> None:
    url, says = target
    says["usage"] = usage
    answer = await asked(url)
    assert answer.ending is Ending.FAILED
    assert answer.why.startswith("unreadable answer: ")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens, answer.matched_tokens) == (0, 0, 0, 0)
    client = Client(url, api_key=None, timeout_s=60.0)
    try:
        reply = await asyncio.to_thread(client.chat, "m", [], 1)
    finally:
        client.close()
    assert reply.error == answer.why
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (0, 0, 0)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(BenchmarkError):
            await timed_chat.chat(session, Target(url=url, model="m", timeout_s=60.0), [], max_tokens=1)
    with pytest.raises(UsageError):
        used(usage)


async def test_what_is_left_out_counts_as_none(target: tuple[str, dict[str, Any]]) -> None:
    url, says = target
    says["usage"] = {"prompt_tokens": 10, "completion_tokens": None, "prompt_tokens_details": {"cached_tokens": 10}}
    answer = await asked(url)
    assert answer.ok
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (10, 0, 10)
    async with aiohttp.ClientSession() as session:
        timed = await timed_chat.chat(session, Target(url=url, model="m", timeout_s=60.0), [], max_tokens=1)
    assert (timed.prompt_tokens, timed.cached_tokens, timed.matched_tokens) == (10, 10, 0)


async def test_counts_of_the_gateway_itself_are_not_believed_either(target: tuple[str, dict[str, Any]]) -> None:
    url, says = target
    asks = Target(url=url, model="m", timeout_s=60.0)
    async with aiohttp.ClientSession() as session:
        for tokens in ("NaN", "-1", "+Inf", "many"):
            says["/metrics"] = f'kvgate_matched_tier_tokens_total{{tier="hbm"}} {tokens}\n'
            with pytest.raises(CommandError, match="no number of tokens"):
                await tier_tokens(session, asks)
        for usable in (-3, True, "2"):
            says["/readyz"] = json.dumps({"usable": usable})
            assert await usable_instances(session, asks) is None
        for more in ({"count": -1}, {"max_model_len": "many"}, {"max_model_len": 0}, {"token_strs": [5]}):
            says["/tokenize"] = json.dumps({"count": 5, **more})
            with pytest.raises(CommandError, match="tells no count"):
                await words_of(session, asks)
