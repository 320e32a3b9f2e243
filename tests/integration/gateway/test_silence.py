"""A client whose instance is silent hears of it, and another instance may still answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lab.conformance.dialects import disorder
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, running_fleet, script
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL, Script

COMMENT = ": keep-alive\n\n"
PING = 'event: ping\ndata: {"type": "ping"}\n\n'
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"


def body_of(path: str) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"model": MODEL, "prompt": "x", "stream": True}
    if path == RESPONSES:
        return {"model": MODEL, "input": "x", "stream": True}
    return chat(stream=True, max_tokens=5)


async def until(answer: Any, *wanted: str) -> str:
    """Read until all of this has come, one after the other."""
    got = ""
    async for data in answer.content.iter_any():
        got += data.decode()
        place = 0
        for each in wanted:
            place = got.find(each, place) + len(each)
            if place < len(each):
                break
        else:
            return got
    raise AssertionError(f"the stream has ended: {got!r}")


@pytest.mark.parametrize(
    ("path", "sign"), [(CHAT, COMMENT), (COMPLETIONS, COMMENT), (RESPONSES, COMMENT), (MESSAGES, PING)]
)
@pytest.mark.parametrize("how", [{"ttft_s": 3600}, {"head_s": 3600}], ids=["no head", "a head"])
async def test_before_the_first_event_silence_is_filled(
    tmp_path: Path, path: str, sign: str, how: dict[str, float]
) -> None:
    async with running_fleet(tmp_path, stream_ping_s=0.2) as fleet:
        async with fleet.gateway.post(path, body_of(path), x_script=script(**how)) as answer:
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-kvgate-instance"] in fleet.engines
            assert await until(answer, sign, sign) == sign + sign
        await eventually(lambda: fleet.active == 0)


async def test_within_an_answer_silence_is_filled_and_a_silent_engine_is_given_up_all_the_same(
    tmp_path: Path,
) -> None:
    async with running_fleet(tmp_path, stream_ping_s=0.2, idle_timeout_s=1.5) as fleet:
        async with fleet.gateway.post(CHAT, chat(stream=True), x_script=script(stall_after=2)) as answer:
            text = await answer.text()
        first, *signs = text.split(COMMENT)
        assert first.count("data: ") == 2
        assert len(signs) > 1
        assert json.loads(signs[-1].split("data: ")[1])["error"]["code"] == "upstream_timeout"
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("ping_s", [0, 3600])
async def test_a_streams_head_comes_at_once_and_nothing_else_unless_it_is_asked_for(
    tmp_path: Path, ping_s: float
) -> None:
    async with running_fleet(tmp_path, stream_ping_s=ping_s, first_byte_timeout_s=3600) as fleet:
        engine = fleet.engines["a"]
        async with fleet.gateway.post(CHAT, chat(stream=True), x_script=script(head_s=3600)) as answer:
            assert answer.status == 200  # and no event is there yet
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await answer.content.readany()
        await eventually(lambda: fleet.active == 0)
        assert engine.healthy


async def answered_late(fleet: Fleet, path: str, script: Script) -> str:
    """What a client gets of the first instance that does this, once its head has gone and a sign has come."""
    a = fleet.engines["a"]
    a.default, a.gate = script, asyncio.Event()
    async with fleet.gateway.post(path, body_of(path)) as answer:
        assert (answer.status, answer.headers["x-kvgate-instance"]) == (200, "a")
        first = await until(answer, PING if path == MESSAGES else COMMENT)
        a.gate.set()
        rest: str = await answer.text()
        return first + rest


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_another_instance_takes_over_under_a_head_that_has_gone(tmp_path: Path, path: str) -> None:
    async with running_fleet(tmp_path, routing_policy="round_robin", stream_ping_s=0.1) as fleet:
        text = await answered_late(fleet, path, Script(head_only=True))
        signs, _, rest = text.partition(": x-kvgate-instance: b; x-kvgate-route: ")
        assert set(signs.split("\n\n")) == {(PING if path == MESSAGES else COMMENT).strip(), ""}
        assert rest.count("tok") == 4
        assert "attempt=2" in rest
        assert [len(each.requests) for each in fleet.engines.values()] == [1, 1]
        assert await fleet.gateway.metric('kvgate_retries_total{cause="no_answer"}') == 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_refusal_behind_a_head_that_has_gone_is_the_event_that_ends_the_stream(
    tmp_path: Path, path: str
) -> None:
    long = "Input length (9000) must be smaller than the model context length (8192)."
    async with running_fleet(tmp_path, routing_policy="round_robin", stream_ping_s=0.1) as fleet:
        text = await answered_late(fleet, path, Script(status=400, error_text=long))
        if path == CHAT:
            assert '"code":"context_length_exceeded"' in text
            assert text.endswith("data: [DONE]\n\n")
        else:
            assert disorder(text) is None
            assert ("prompt is too long" if path == MESSAGES else "context_length_exceeded") in text
        outcome = 'outcome="client_error"'
        operation = {CHAT: "chat_completions", RESPONSES: "responses", MESSAGES: "messages"}[path]
        await fleet.gateway.counted(f'kvgate_requests_total{{operation="{operation}",{outcome}}}', 1)


async def test_an_instance_that_dies_behind_its_head_with_nobody_to_take_over_ends_the_stream(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, routing_policy="round_robin", stream_ping_s=0.1, max_attempts=1) as fleet:
        text = await answered_late(fleet, CHAT, Script(head_only=True))
        error, done = [each.partition("data: ")[2] for each in text.split("\n\n") if "data: " in each]
        assert json.loads(error)["error"]["code"] == "upstream_unreachable"
        assert done == "[DONE]"


async def test_a_deadline_behind_a_head_that_has_gone_ends_the_stream(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path, stream_ping_s=0.1) as fleet,
        fleet.gateway.post(CHAT, chat(stream=True), x_script=script(ttft_s=3600), x_kvgate_timeout_s="1") as answer,
    ):
        assert answer.status == 200
        text = await answer.text()
        assert '"code":"deadline_exceeded"' in text
        assert text.endswith("data: [DONE]\n\n")
        await eventually(lambda: fleet.active == 0)


async def test_an_answer_that_is_no_stream_keeps_its_status_and_is_not_filled(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path, stream_ping_s=0.1) as fleet,
        fleet.gateway.post(CHAT, chat(), x_script=script(ttft_s=1.0, status=429)) as answer,
    ):
        assert answer.status == 429
