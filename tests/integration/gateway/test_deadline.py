"""A request has one time for all that may happen to it: the queue, every attempt, the answer to its last byte."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.state import Kind
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, running_fleet, script
from tests.support.people import put
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import Script, ScriptedEngine

NEVER = script(ttft_s=3600)
ENDLESS = script(chunks=4, stall_after=2)
DEADLINES = 'kvgate_requests_total{operation="chat_completions",outcome="deadline"}'


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, request_timeout_s=60.0) as running:
        yield running


async def ended(fleet: Fleet, timeout_s: str, how: str, **body: object) -> tuple[int, str]:
    async with fleet.gateway.post(CHAT, chat(**body), x_script=how, x_kvgate_timeout_s=timeout_s) as answer:
        return answer.status, await answer.text()


def data_events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_byte_it_is_a_504_and_the_engine_is_free(fleet: Fleet, *, stream: bool) -> None:
    status, text = await ended(fleet, "0.3", NEVER, stream=stream)
    assert status == 504
    error = json.loads(text)["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert "0.3 s" in error["message"]
    await eventually(lambda: fleet.active == 0)
    await fleet.gateway.counted(DEADLINES, 1)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_within_a_stream_it_is_an_error_event_and_done(fleet: Fleet, path: str) -> None:
    async with fleet.gateway.post(
        path, chat(stream=True, prompt="x"), x_script=ENDLESS, x_kvgate_timeout_s="3"
    ) as answer:
        assert answer.status == 200
        events = data_events(await answer.text())
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    assert all(json.loads(event)["choices"] for event in events[:-2])
    await eventually(lambda: fleet.active == 0)
    for name in fleet.engines:
        await fleet.gateway.counted(f'kvgate_requests_in_flight{{instance="{name}"}}', 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", {"max_tokens": 5}), ("/v1/responses", {"messages": None, "input": "hi"})],
    ids=["messages", "responses"],
)
async def test_within_a_stream_of_another_api_it_is_that_apis_error_event(
    fleet: Fleet, path: str, body: dict[str, object]
) -> None:
    said = {name: value for name, value in chat(stream=True, **body).items() if value is not None}
    async with fleet.gateway.post(path, said, x_script=ENDLESS, x_kvgate_timeout_s="3") as answer:
        assert answer.status == 200
        last = (await answer.text()).rstrip().rpartition("\n\n")[2]
    kind, data = last.split("\n")
    assert kind == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert told["type"] == "error"
    assert (told.get("code") or told["error"]["type"]) in {"deadline_exceeded", "timeout_error"}
    await eventually(lambda: fleet.active == 0)


async def test_one_time_is_for_all_attempts(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, routing_policy="round_robin") as fleet:
        fleet.engines["a"].default = Script(status=503)
        fleet.engines["b"].default = Script(ttft_s=3600)
        async with fleet.gateway.post(CHAT, chat(), x_kvgate_timeout_s="1") as answer:
            assert answer.status == 504
        assert [len(each.requests) for each in fleet.engines.values()] == [1, 1]
        await eventually(lambda: fleet.active == 0)


async def test_in_the_queue_it_is_a_504_and_the_queue_is_left(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, max_instance_requests=1) as fleet:
        first = asyncio.create_task(ended(fleet, "60", NEVER))
        await eventually(lambda: fleet.active == 1)
        status, text = await ended(fleet, "0.3", script())
        assert (status, json.loads(text)["error"]["code"]) == (504, "deadline_exceeded")
        assert fleet.requests == 1

        async def none_waits() -> bool:
            return await fleet.gateway.metric("kvgate_requests_waiting") == 0

        await eventually(none_waits)
        first.cancel()


async def test_the_setting_bounds_what_a_client_may_ask_for(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, request_timeout_s=0.4) as fleet:
        assert (await ended(fleet, "3600", NEVER))[0] == 504
        async with fleet.gateway.post(CHAT, chat(), x_script=NEVER) as answer:
            assert answer.status == 504


async def test_what_is_done_in_time_is_not_touched_and_engines_are_not_told(fleet: Fleet) -> None:
    for _ in range(3):
        assert (await ended(fleet, "59.5", script()))[0] == 200
    assert "x-kvgate-timeout-s" not in fleet.last_headers()


async def test_a_time_that_is_none_is_a_400(fleet: Fleet) -> None:
    for said in ("0", "0.0", "-1", "soon", "1e3", "inf", "30s", "1234567"):
        status, text = await ended(fleet, said, script())
        assert status == 400, said
        assert json.loads(text)["error"]["param"] == "x-kvgate-timeout-s"
    assert fleet.requests == 0


async def test_a_client_that_does_not_read_keeps_nothing_beyond_its_time(fleet: Fleet) -> None:
    host, port = fleet.gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps(chat(stream=True)).encode()
    how = script(chunks=3_000, text="x" * 7_000)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-script: {how}\r\nx-kvgate-timeout-s: 3\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await eventually(lambda: fleet.requests == 1)
    await eventually(lambda: fleet.active == 0)
    await fleet.gateway.counted(DEADLINES, 1)
    writer.close()


async def test_a_clients_short_times_are_not_held_against_instances(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, breaker_failures=1) as fleet:
        assert (await ended(fleet, "0.2", NEVER, stream=True))[0] == 504
        assert "deadline_exceeded" in (await ended(fleet, "3", ENDLESS, stream=True))[1]
        assert await fleet.gateway.metric('kvgate_instance_breaker{instance="a",state="closed"}') == 1
        assert (await ended(fleet, "30", script()))[0] == 200


async def test_an_answer_that_began_is_paid_for_and_one_that_did_not_is_free(tmp_path: Path) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=100, tokens_per_min=10_000)
    async with running_fleet(tmp_path, api_keys=[{"key": "k", "tenant": "acme"}]) as fleet:

        async def left(how: str, timeout_s: str, **body: object) -> int:
            async with fleet.gateway.post(
                CHAT,
                chat(max_tokens=1000, **body),
                x_script=how,
                x_kvgate_timeout_s=timeout_s,
                authorization="Bearer k",
            ) as answer:
                await answer.read()
                return int(answer.headers["x-ratelimit-remaining-tokens"])

        await left(NEVER, "0.2")
        before = await left(ENDLESS, "3", stream=True)
        assert before >= 8_900
        assert await left(script(), "30") <= before - 1000
