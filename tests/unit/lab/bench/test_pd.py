"""The benchmark of separation through gateways that are there: the same work to both, and what they did to it."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

import pytest
from aiohttp import web
from typer.testing import CliRunner

from kvgate.failure import CommandError
from lab.bench.command import build_bench
from lab.bench.pd import PdGateways, PdPlan, run
from lab.bench.timed_chat import BenchmarkError
from tests.support.serving import serving

SHORT_LETTERS = 100


class Server:
    """Streams a token every 5 ms; one that doesn't separate lets all answers stand still for a long prompt."""

    def __init__(
        self,
        *,
        stands_still_s: float = 0.0,
        model: str = "scripted",
        status: int = 200,
        text: str = "a",
        last: object = None,
    ) -> None:
        self.stands_still_s = stands_still_s
        self.model = model
        self.status = status
        self.text = text
        self.last = last
        self.long_prompts: list[str] = []
        self._free = asyncio.Lock()

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["model"] == self.model
        if self.status != 200:
            return web.json_response({"error": {"message": "no room"}}, status=self.status)
        if len(body["prompt"]) > SHORT_LETTERS:
            self.long_prompts.append(body["prompt"])
            async with self._free:
                await asyncio.sleep(self.stands_still_s)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            async with self._free:
                await asyncio.sleep(0.001)
            await self.event(response, {"choices": [{"text": self.text}], "error": None})
        if self.last is not None:
            await self.event(response, self.last)
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def event(response: web.StreamResponse, said: object) -> None:
        await response.write(b"data: " + json.dumps(said).encode() + b"\n\n")


@contextmanager
def served(*servers: Server) -> Iterator[list[str]]:
    """Serve from a thread of its own: ``run`` has a loop of its own too."""
    urls: list[str] = []
    ready, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            for server in servers:
                application = web.Application()
                application.router.add_get("/v1/models", server.models)
                application.router.add_post("/v1/completions", server.complete)
                urls.append(await stack.enter_async_context(serving(application)))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield urls
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
        loop.close()


def plan(urls: list[str]) -> PdPlan:
    gateways = PdGateways(separated=urls[0], hybrid=urls[1])
    return PdPlan(on=gateways, answers=2, prompts=3, prompt_tokens=2 * SHORT_LETTERS, period_s=0.05, rounds=2)


def test_both_gateways_get_the_same_work_and_the_one_that_stands_still_is_seen_to() -> None:
    apart, whole = Server(), Server(stands_still_s=0.5)
    said: list[str] = []
    with served(apart, whole) as urls:
        report = run(plan(urls), said.append)
    assert len(apart.long_prompts) == len(whole.long_prompts) == 2 + 2 * 3, "two to warm up, and two rounds"
    assert not set(apart.long_prompts) & set(whole.long_prompts), "nothing is there from the other"
    metrics = report.metrics
    assert metrics["hybrid_itl_max_ms"] >= 500
    assert metrics["hybrid_long_ttft_p50_ms"] >= 500
    assert metrics["itl_p99_improvement_ratio"] == pytest.approx(
        metrics["hybrid_itl_p99_ms"] / metrics["separated_itl_p99_ms"]
    )
    assert said == [
        f"{turn}: {name}" for turn in ("warm-up", "round 1 of 2", "round 2 of 2") for name in ("hybrid", "separated")
    ]


def test_a_text_that_says_error_is_an_answer_like_any_other() -> None:
    with served(Server(text="error"), Server(text='"error"')) as urls:
        report = run(plan(urls), lambda _: None)
    assert report.metrics["separated_itl_samples"] > 0


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ({"error": {"message": "instance died"}}, "failed mid-stream.*instance died"),
        ({"choices": [{"text": "", "finish_reason": "error"}]}, "ended an answer with 'error'"),
        ([1], "is no event"),
    ],
)
def test_an_answer_that_fails_in_its_stream_ends_it_by_the_shape_of_the_event(last: object, problem: str) -> None:
    with served(Server(), Server(last=last)) as urls, pytest.raises(BenchmarkError, match=problem):
        run(plan(urls), lambda _: None)


def test_gateways_with_two_models_are_not_compared() -> None:
    with (
        served(Server(), Server(model="other")) as urls,
        pytest.raises(BenchmarkError, match="serve scripted and other; it must be one model"),
    ):
        run(plan(urls), print)


def invoke(*options: str) -> None:
    CliRunner().invoke(build_bench(), ["pd", *options], catch_exceptions=False)


def test_a_request_that_is_refused_ends_it_with_the_answer() -> None:
    with served(Server(), Server(status=503)) as urls, pytest.raises(CommandError, match=r"answered 503.*no room"):
        invoke("--separated", urls[0], "--hybrid", urls[1], "--json")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--separated", "http://127.0.0.1:1"], "--separated and --hybrid go together"),
        (["--hybrid", "http://127.0.0.1:1"], "--separated and --hybrid go together"),
        (["--separated", "http://127.0.0.1:1", "--hybrid", "http://127.0.0.1:2", "--model", "."], "--model goes with"),
        (["--separated", "http://127.0.0.1:1", "--hybrid", "http://127.0.0.1:1"], "http://127.0.0.1:1"),
    ],
)
def test_what_can_not_be_measured_is_said(options: list[str], problem: str) -> None:
    with pytest.raises(CommandError, match=problem):
        invoke(*options)
