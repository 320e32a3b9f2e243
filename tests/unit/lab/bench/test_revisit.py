"""The revisit benchmark reports what a gateway did, from the outside, and refuses to report on failures."""

import asyncio
import json
from contextlib import AbstractAsyncContextManager

import pytest
from aiohttp import web

from lab.bench.revisit import RevisitPlan, run
from lab.bench.timed_chat import BenchmarkError
from lab.report import Host, Report
from tests.support.serving import serving

PLAN = RevisitPlan(conversations=2, turns=3, first_words=20, turn_words=3, max_tokens=3)


class RememberingServer:
    """Streams three words; a prompt that extends one it has seen is "cached" up to there and answered sooner."""

    def __init__(self, *, cold_s: float = 0.05, remembers: bool = True) -> None:
        self.seen: set[str] = set()
        self.cold_s = cold_s
        self.remembers = remembers
        self.prompts: list[str] = []

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = "|".join(message["content"] for message in body["messages"])
        self.prompts.append(prompt)
        cached = max((len(old) for old in self.seen if prompt.startswith(old)), default=0) if self.remembers else 0
        self.seen.add(prompt)
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream",
                "x-kvgate-matched-tokens": str(cached),
                "x-kvgate-instance": "engine-0",
            }
        )
        await response.prepare(request)
        if not cached:
            await asyncio.sleep(self.cold_s)
        for word in ("one ", "two ", "three"):
            await self._event(response, {"choices": [{"delta": {"content": word}}]})
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        }
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, event: object) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def answering(server: RememberingServer) -> AbstractAsyncContextManager[str]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/chat/completions", server.chat)
    return serving(app)


async def test_later_turns_carry_the_whole_conversation_and_count_as_revisits() -> None:
    server = RememberingServer()
    async with answering(server) as url:
        metrics = await run([url], PLAN)
    assert len(server.prompts) == PLAN.conversations * PLAN.turns
    assert metrics["predicted_equals_cached_share"] == 1.0
    assert 0.5 < metrics["cached_share_of_revisited_tokens"] < 1.0
    assert metrics["prompt_revisit_p50_tokens"] > metrics["prompt_cold_p50_tokens"]


async def test_two_targets_get_the_same_amount_of_work_and_share_no_prefix() -> None:
    ours, theirs = RememberingServer(), RememberingServer(remembers=False)
    async with answering(ours) as url, answering(theirs) as baseline:
        metrics = await run([url, baseline], PLAN)
    assert len(ours.prompts) == len(theirs.prompts)
    assert not any(a.startswith(b[:17]) for a in ours.prompts for b in theirs.prompts)
    assert metrics["baseline_cached_share_of_revisited_tokens"] == 0.0
    assert metrics["ttft_revisit_mean_speedup_over_baseline"] > 1.0


async def test_the_same_seed_asks_the_same_questions() -> None:
    first, second = RememberingServer(cold_s=0), RememberingServer(cold_s=0)
    for server in (first, second):
        async with answering(server) as url:
            await run([url], PLAN)
    assert first.prompts == second.prompts


async def test_a_target_that_fails_is_named_and_nothing_is_reported() -> None:
    class Failing(RememberingServer):
        async def chat(self, _: web.Request) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no instance"}}, status=503)

    async with answering(Failing()) as url:
        with pytest.raises(BenchmarkError, match=f"{url}: 503.*no instance"):
            await run([url], PLAN)


async def test_an_error_event_in_the_stream_is_a_failure() -> None:
    class Dying(RememberingServer):
        async def chat(self, request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await self._event(response, {"error": {"message": "instance died"}})
            return response

    async with answering(Dying()) as url:
        with pytest.raises(BenchmarkError, match=r"error in the stream.*instance died"):
            await run([url], PLAN)


async def test_an_error_that_is_null_is_none_and_a_text_may_say_error() -> None:
    class Spelling(RememberingServer):
        @staticmethod
        async def _event(response: web.StreamResponse, event: object) -> None:
            assert isinstance(event, dict)
            for choice in event["choices"]:
                choice["delta"]["content"] = '"error"'
            await response.write(b"data: " + json.dumps({"error": None, **event}).encode() + b"\n\n")

    async with answering(Spelling()) as url:
        metrics = await run([url], PLAN)
    assert metrics["predicted_equals_cached_share"] == 1.0


async def test_a_stream_without_usage_is_a_failure() -> None:
    class Silent(RememberingServer):
        async def chat(self, request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await self._event(response, {"choices": [{"delta": {"content": "hi"}}]})
            await response.write(b"data: [DONE]\n\n")
            return response

    async with answering(Silent()) as url:
        with pytest.raises(BenchmarkError, match="no usage told"):
            await run([url], PLAN)


async def test_a_target_that_is_not_there_is_named() -> None:
    async with answering(RememberingServer()) as url:
        gone = url
    with pytest.raises(BenchmarkError, match=gone):
        await run([gone], PLAN)


async def test_a_target_that_is_no_gateway_is_named() -> None:
    class Other(RememberingServer):
        async def models(self, _: web.Request) -> web.Response:
            return web.Response(text="<html>")

    async with answering(Other()) as url:
        with pytest.raises(BenchmarkError, match=url):
            await run([url], PLAN)


def test_the_report_is_one_json_object_with_the_host_and_rounded_metrics() -> None:
    report = json.loads(Report(bench="revisit", host=Host.here(), metrics={"ttft_cold_p50_s": 0.123456}).as_json())
    assert set(report) == {"bench", "host", "metrics"}
    assert report["metrics"] == {"ttft_cold_p50_s": 0.1235}
    assert report["host"]["cores"] >= 1
