"""``kvgate conformance``: our gateway keeps every case; one that does what others do breaks those it should."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from kvgate.host.ports import free_ports
from lab.conformance.runner import CASES, make_rig, make_session, outcome_of
from tests.support.command import typed
from tests.support.serving import serving

LIMIT_S = 280.0
BROKEN_BY_A_NAIVE_PROXY = {
    "body-bytes-unchanged",
    "caller-headers-kept",
    "chunked-request",
    "dead-backend-unnoticed",
    "death-mid-stream-says-so",
    "foreign-error-wrapped",
    "leave-whole-answer",
    "malformed-body-400",
    "media-type-kept",
    "models-listed-once",
    "no-retry-of-429-and-500",
    "retry-after-kept",
    "status-kept",
    "stream-is-not-buffered",
    "unknown-fields-kept",
    "unknown-model-404",
    "usage-only-when-asked",
}


def test_our_own_gateway_keeps_every_case() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvgate", "conformance", "--self", "--json"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    said = json.loads(done.stdout)
    assert [case for case in said["cases"] if not case["ok"]] == []
    assert (said["passed"], said["failed"]) == (len(CASES), 0)
    assert {case["id"] for case in said["cases"]} == {case.id for case in CASES}
    assert done.returncode == 0


def test_cases_have_ids_of_their_own_and_say_what_they_ask() -> None:
    assert len({case.id for case in CASES}) == len(CASES) > 40
    assert [case.id for case in CASES if not case.about or not case.seen] == []


@asynccontextmanager
async def naive_proxy(backends: list[str]) -> AsyncIterator[str]:
    """What a first attempt does: parse, rewrite, wait for the whole answer, say 200, try again on errors."""
    turn = 0

    async def chat(request: web.Request) -> web.Response:
        nonlocal turn
        said = {"temperature": 1.0} | json.loads(await request.read())
        said.pop("user", None)
        async with aiohttp.ClientSession() as session:
            for _ in range(3):
                turn += 1
                async with session.post(backends[turn % 2] + request.path, json=said) as answer:
                    status, text = answer.status, await answer.text()
                if status < 429:
                    break
        kind = "text/event-stream" if said.get("stream") else "application/json"
        return web.Response(text=text, content_type=kind)

    async def models(request: web.Request) -> web.Response:
        del request
        cards = []
        async with aiohttp.ClientSession() as session:
            for url in backends:
                async with session.get(url + "/v1/models") as answer:
                    cards += (await answer.json())["data"]
        return web.json_response({"object": "list", "data": cards})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/completions", chat)
    app.router.add_get("/v1/models", models)
    async with serving(app, handler_cancellation=False) as url:
        yield url


@pytest.fixture
async def broken() -> set[str]:
    """The ids that the naive proxy breaks, of the cases that take no minutes."""
    ports = free_ports(2)
    wanted = BROKEN_BY_A_NAIVE_PROXY | {"text-completions", "stream-complete", "right-error-unchanged", "embeddings"}
    async with naive_proxy([f"http://127.0.0.1:{port}" for port in ports]) as target, make_session() as session:
        rig = make_rig(target, ports, session)
        for backend in rig.backends:
            await backend.start()
        try:
            outcomes = [await outcome_of(case, rig) for case in CASES if case.id in wanted]
        finally:
            for backend in rig.backends:
                await backend.stop()
    assert {each.id for each in outcomes} == wanted
    assert [each.id for each in outcomes if not each.ok and not each.why] == []
    return {each.id for each in outcomes if not each.ok}


async def test_a_naive_proxy_is_found_out_and_what_it_does_well_is_granted(broken: set[str]) -> None:
    assert broken >= BROKEN_BY_A_NAIVE_PROXY - {"chunked-request", "usage-only-when-asked"}
    assert not broken & {"text-completions", "stream-complete"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--url URL or --self"),
        (["--self", "--only", "nothing-like-it"], "no case"),
        (["--url", "http://127.0.0.1:1", "--only", "stop-signal"], "need --self or --pid"),
        (["--url", "http://127.0.0.1:1", "--backends", "9001"], "two ports"),
    ],
)
def test_wrong_arguments_are_explained(arguments: list[str], said: str) -> None:
    done = typed("conformance", *arguments)
    assert done.code == 1
    assert said in done.err
