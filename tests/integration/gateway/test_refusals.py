"""What engines refuse reaches clients in their dialect's words, and never counts against an instance."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.state import Kind
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, running_fleet, script
from tests.support.people import put
from tests.support.scripted_engine import MODEL, ScriptedEngine

LONG = "Input length (9000) must be smaller than the model context length (8192)."
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat()),
    (COMPLETIONS, {"model": MODEL, "prompt": "x"}),
    ("/v1/responses", {"model": MODEL, "input": "x"}),
    ("/v1/messages", chat(max_tokens=5)),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=[path for path, _ in ASKED])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_has_the_code_that_clients_compact_on(
    tmp_path: Path, path: str, body: dict[str, Any], *, stream: bool
) -> None:
    async with running_fleet(tmp_path) as fleet:
        said = script(status=400, error_text=LONG)
        async with fleet.gateway.post(path, {**body, "stream": stream}, x_script=said) as answer:
            error = (await answer.json())["error"]
            assert answer.status == 400
        if path == "/v1/messages":
            assert error == {
                "type": "invalid_request_error",
                "message": "prompt is too long: 9000 tokens > 8192 maximum",
            }
        else:
            assert error["code"] == "context_length_exceeded"
            assert "maximum context length is 8192 tokens" in error["message"]


MISTAKES = [
    {"status": 500, "error_text": LONG},
    {"status": 400, "error_text": "n must be 1"},
    {"status": 422, "error": "detail"},
    {"status": 501, "error_text": "no such thing here"},
    {"chunks": 1, "error_event": True, "error_code": 400, "error_text": LONG},
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=["500", "400", "422", "501", "event"])
async def test_the_clients_mistakes_take_no_instance_out(tmp_path: Path, mistake: dict[str, Any]) -> None:
    """One of two instances gets mistakes alone, the other one good requests alone."""
    async with running_fleet(tmp_path, routing_policy="round_robin", breaker_failures=3) as fleet:
        for _ in range(12):
            async with fleet.gateway.post(CHAT, chat(stream=True), x_script=script(**mistake)) as answer:
                await answer.read()
                assert answer.status < 500
                wronged = answer.headers["x-kvgate-instance"]
            async with fleet.gateway.post(CHAT, chat()) as answer:
                assert answer.status == 200
                assert answer.headers["x-kvgate-instance"] != wronged
        await fleet.gateway.counted('kvgate_requests_total{operation="chat_completions",outcome="client_error"}', 12)
        assert await used(fleet) == {"a", "b"}


async def used(fleet: Fleet) -> set[str]:
    """Which instances get the next requests."""
    names = set()
    for _ in range(4):
        async with fleet.gateway.post(CHAT, chat()) as answer:
            names.add(answer.headers["x-kvgate-instance"])
    return names


async def test_streamed_completions_with_logprobs_are_refused_before_lmdeploy_fails_on_them(tmp_path: Path) -> None:
    other = ScriptedEngine(model="other")
    other.extra_card = {"owned_by": "somebody"}
    async with running_fleet(tmp_path, {"a": ScriptedEngine(), "b": other}) as fleet:
        asked = {"model": MODEL, "prompt": "x", "logprobs": 2, "stream": True}
        async with fleet.gateway.post(COMPLETIONS, asked) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"], error["code"]) == (400, "logprobs", "unsupported_parameter")
        assert fleet.requests == 0
        fine = ({"stream": False}, {"logprobs": None}, {"logprobs": 0}, {"model": "other"})
        for change in fine:
            async with fleet.gateway.post(COMPLETIONS, asked | change) as answer:
                assert answer.status == 200
        assert fleet.requests == len(fine)


async def test_a_tenants_own_limit_has_anthropics_words_for_anthropics_clients(tmp_path: Path) -> None:
    key = "sk-a"
    await put(tmp_path, Kind.QUOTA, "acme", context_tokens=10)
    async with running_fleet(tmp_path, api_keys=[{"key": key, "tenant": "acme"}]) as fleet:
        long = chat(max_tokens=1, messages=[{"role": "user", "content": "x" * 4000}])
        async with fleet.gateway.post("/v1/messages", long, x_api_key=key) as answer:
            said = json.loads(await answer.text())["error"]["message"]
            assert answer.status == 400
            assert said.startswith("prompt is too long: ")
            assert said.endswith(" tokens > 10 maximum")
