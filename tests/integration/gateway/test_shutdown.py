"""A gateway that ends says so before, and every request that it cuts off reads of it in its own dialect."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.state import Kind
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, instances, running_fleet, script
from tests.support.people import put
from tests.support.running_gateway import DEADLINE_S, RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine

NEVER = script(ttft_s=3600)
ENDLESS = script(chunks=4, stall_after=2)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(),
    COMPLETIONS: {"model": MODEL, "prompt": "hi"},
    "/v1/messages": chat(max_tokens=5),
    "/v1/responses": {"model": MODEL, "input": "hi"},
}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, shutdown_grace_s=0.2) as running:
        yield running


def code_of(path: str, said: Any) -> str:
    """What a client of this API goes by."""
    return str(said["error"]["type"] if path == "/v1/messages" else said.get("code") or said["error"]["code"])


def wanted(path: str) -> str:
    return "overloaded_error" if path == "/v1/messages" else "shutting_down"


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_outlasts_the_grace_period_ends_with_the_error_of_its_dialect(
    fleet: Fleet, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet.gateway.post(path, BODIES[path] | {"stream": True}, x_script=ENDLESS) as answer:
        assert answer.status == 200
        begun = await answer.content.readany()
        fleet.gateway.stop()
        text = (begun + await answer.content.read()).decode()
    events = [event for event in text.split("\n\n") if event]
    if path in {CHAT, COMPLETIONS}:
        assert events.pop() == "data: [DONE]"
    else:
        assert events[-1].startswith("event: error\n")
    assert code_of(path, json.loads(events[-1].rpartition("data: ")[2])) == wanted(path)
    await fleet.gateway.stopped()
    assert fleet.active == 0
    assert [each for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_that_outlasts_it_becomes_an_error_in_its_dialect(
    fleet: Fleet, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = asyncio.create_task(_status(fleet.gateway, path, x_script=NEVER))
    await eventually(lambda: fleet.active == 1)
    fleet.gateway.stop()
    assert await asked == (503, wanted(path), "close", "1")
    await fleet.gateway.stopped()
    assert [each for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR] == []


async def _status(gateway: RunningGateway, path: str, **headers: str) -> tuple[int, str, str | None, str | None]:
    async with gateway.post(path, BODIES[path], **headers) as answer:
        said = await answer.json()
        kept = answer.headers.get("connection"), answer.headers.get("retry-after")
        return answer.status, code_of(path, said), *kept


async def test_what_waits_in_the_queue_or_for_its_body_ends_with_an_error_too(tmp_path: Path) -> None:
    settings = {"max_instance_requests": 1, "shutdown_grace_s": 0.2}
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, **settings) as fleet:
        gateway = fleet.gateway
        running = asyncio.create_task(_status(gateway, CHAT, x_script=NEVER))
        await eventually(lambda: fleet.active == 1)
        waiting = asyncio.create_task(_status(gateway, CHAT))
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()

        async def both_wait() -> bool:
            return await gateway.metric("kvgate_requests_waiting") == 1

        await eventually(both_wait)
        gateway.stop()
        assert [each[:2] for each in await asyncio.gather(running, waiting)] == [(503, "shutting_down")] * 2
        async with asyncio.timeout(DEADLINE_S):
            assert b"503" in await reader.readline()
            assert b"shutting_down" in await reader.read()
        writer.close()
        await writer.wait_closed()
        await gateway.stopped()


async def test_while_it_drains_it_says_so_and_what_runs_ends_well(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    settings = {"shutdown_notice_s": 3.0, "shutdown_grace_s": 60.0}
    async with running_fleet(tmp_path, {"a": engine}, **settings) as fleet:
        gateway = fleet.gateway
        engine.gate = asyncio.Event()
        running = asyncio.create_task(_answered(gateway))
        await eventually(lambda: fleet.active == 1)
        gateway.stop()

        async def draining() -> bool:
            async with gateway.get("/readyz") as answer:
                said = await answer.json()
                return answer.status == 503 and said["status"] == "draining: it is shutting down"

        await eventually(draining)
        async with gateway.get("/healthz") as answer:
            assert answer.status == 200
        engine.gate.set()
        assert await running == 200
        seen: list[str] = []
        stream = asyncio.create_task(_streamed(gateway))
        await eventually(lambda: fleet.active == 1)
        while not stream.done():  # served as long as it listens, then refused, and a stream goes on
            try:
                seen.append(str(await _answered(gateway)))
            except aiohttp.ClientConnectorError as error:
                seen.append(type(error.os_error).__name__)
                fleet.engines["a"].gate.set()
        assert set(seen) == {"200", "ConnectionRefusedError"}
        assert seen == sorted(seen)
        assert (await stream).endswith("data: [DONE]\n\n")
        await gateway.stopped()


async def _streamed(gateway: RunningGateway) -> str:
    async with gateway.post(CHAT, chat(stream=True), x_script=script(chunks=60, chunk_s=0.1)) as answer:
        return (await answer.content.read()).decode()


async def _answered(gateway: RunningGateway) -> int:
    async with gateway.post(CHAT, chat()) as answer:
        assert (await answer.json())["choices"]
        return int(answer.status)


@pytest.mark.parametrize("keys", [True, False])
async def test_requests_before_the_first_health_checks_wait_for_them(tmp_path: Path, *, keys: bool) -> None:
    engine = ScriptedEngine()
    engine.health_gate = asyncio.Event()
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=100)
    settings = {"api_keys": [{"key": "acme-key", "tenant": "acme"}]} if keys else {}
    async with (
        engine.started(),
        running_gateway(tmp_path, instances=instances({"a": engine}), health_timeout_s=20.0, **settings) as gateway,
    ):
        headers = {"authorization": "Bearer acme-key"}

        async def answered() -> int:
            async with gateway.post(CHAT, chat(), **headers) as answer:
                return int(answer.status)

        async def listed() -> list[str]:
            async with gateway.get("/v1/models", **headers) as answer:
                return [card["id"] for card in (await answer.json())["data"]]

        asked, models = asyncio.create_task(answered()), asyncio.create_task(listed())
        for _ in range(3):
            async with gateway.get("/healthz") as answer:
                assert answer.status == 200
        assert not asked.done()
        assert not models.done()
        engine.health_gate.set()
        assert await asked == 200
        assert await models == [MODEL]


async def test_once_each_instance_was_checked_and_none_is_there_it_is_a_503_at_once(tmp_path: Path) -> None:
    gone = [{"id": "a", "url": "http://127.0.0.1:9"}]
    async with running_gateway(tmp_path, instances=gone, health_timeout_s=20.0) as gateway:
        async with gateway.post(CHAT, chat()) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "no_instance"
        async with gateway.get("/v1/models") as answer:
            assert (await answer.json())["data"] == []
