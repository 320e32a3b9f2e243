"""A streamed chat counts as answered when its stream is whole and reports no failure, whatever its text says."""

import asyncio
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
from loadtests.exchange import Client
from tests.support.serving import serving

SEEN = web.AppKey("seen", asyncio.Semaphore)
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


def chunked(*writes: list[Any] | None) -> web.Application:
    """A stream of these writes, each of some events, one for each time that ``SEEN`` is released; the connection breaks
    at None.
    """

    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for events in writes:
            await request.app[SEEN].acquire()
            if events is None:
                assert request.transport is not None
                request.transport.close()
                return response
            await response.write("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app[SEEN] = asyncio.Semaphore(0)
    app.router.add_post("/v1/chat/completions", chat)
    return app


async def stepped(app: web.Application, *, asked_tokens: int) -> Answer:
    """Ask, with a clock that goes on by one when a request is sent and with each read of its stream."""
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        app[SEEN].release()
        return now_s

    answer = Answer(number=0, due_s=0.0)
    async with serving(app) as url, aiohttp.ClientSession() as session:
        await Chats(session, Target(url=url, model="m", timeout_s=60.0), clock).ask(MESSAGES, asked_tokens, answer)
    return answer


def token(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, **more}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


async def test_the_first_event_with_a_choice_is_the_first_token_also_without_text() -> None:
    end = {"choices": [{"delta": {"content": ""}, "finish_reason": "length"}]}
    app = chunked([token("")], [token("")], [token("")], [end, usage(3)])
    answer = await stepped(app, asked_tokens=3)
    assert answer.ok
    assert (answer.first_s, answer.last_s, answer.events) == (2.0, 4.0, 3), "it was sent at 1"
    assert answer.tpot_s == 1.0


async def test_tokens_without_text_are_events_and_one_that_only_ends_the_answer_is_none() -> None:
    end = {"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}
    app = chunked([token("a")], [token("")], [token("")], [token("d")], [end, usage(4)])
    answer = await stepped(app, asked_tokens=4)
    assert (answer.events, list(answer.gaps_s), answer.tpot_s) == (4, [1.0, 1.0, 1.0], 1.0)


async def test_the_time_per_token_is_by_the_usage_where_an_event_has_several_tokens() -> None:
    app = chunked([token("a b c d")], [token("e f g h", finish_reason="length"), usage(8)])
    answer = await stepped(app, asked_tokens=8)
    assert (answer.events, answer.tpot_s) == (2, pytest.approx(1 / 7))
    assert not answer.is_short


async def test_an_answer_in_one_write_says_nothing_of_the_time_between_its_tokens() -> None:
    answer = await stepped(chunked([token("a"), token("b"), token("c"), usage(3)]), asked_tokens=16)
    assert answer.ok
    assert (answer.came_at_once, answer.is_short) == (True, True)


async def test_a_failure_that_was_told_outlives_the_connection() -> None:
    gone = {"error": {"message": "instance died", "code": "instance_lost"}}
    answer = await stepped(chunked([token("a")], [gone], None), asked_tokens=3)
    assert (answer.ending, answer.why) == (Ending.FAILED, "error in the stream instance_lost")
    assert "instance died" in answer.detail
    answer = await stepped(chunked([token("a")], None), asked_tokens=3)
    assert (answer.ending, answer.why) == (Ending.FAILED, "connection lost")


async def test_a_refusal_whose_body_breaks_off_is_still_that_refusal() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=429, headers={"content-length": "100"})
        await response.prepare(request)
        await response.write(b'{"error"')
        assert request.transport is not None
        request.transport.close()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", refuse)
    async with serving(app) as url:
        answer, _ = await asked(url)
        assert (answer.ending, answer.why) == (Ending.SHED, "429")


async def test_load_tests_take_the_same_first_token_and_keep_the_same_failure() -> None:
    silent = streaming(token(""), token("a"), token("", finish_reason="length"), usage(2))
    gone = {"error": {"message": "instance died", "code": "instance_lost"}}
    for app, error, events in ((silent, "", 2), (chunked([token("a")], [gone], None), "error in the stream ", 1)):
        if SEEN in app:
            for _ in range(3):
                app[SEEN].release()
        async with serving(app) as url:
            client = Client(url, api_key=None, timeout_s=60.0)
            try:
                reply = await asyncio.to_thread(client.chat, "m", MESSAGES, 2)
            finally:
                client.close()
        assert reply.error.startswith(error)
        assert bool(reply.error) is bool(error)
        assert len(reply.gaps_ms) == events - 1
        assert 0 < reply.ttft_ms <= reply.total_ms


async def test_a_benchmark_needs_text_where_a_run_needs_tokens_alone() -> None:
    silent = {"choices": [{"delta": {"content": ""}}]}
    async with serving(streaming(silent, USAGE)) as url:
        answer, kept = await asked(url)
        assert (answer.ok, kept) == (True, [])
        async with aiohttp.ClientSession() as session:
            with pytest.raises(BenchmarkError, match="without content"):
                await timed(session, Target(url=url, model="m", timeout_s=60.0), MESSAGES, 1)
