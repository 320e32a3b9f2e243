"""Engines that refuse, die, stall or hang, and clients that leave."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from gateway.telemetry.logs import FIELDS
from kvcontrol.core.control import OffloadStats
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, running_fleet, script
from tests.support.running_gateway import eventually, running_gateway
from tests.support.scripted_engine import MODEL, Script, ScriptedEngine

NAMES = {"a", "b"}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, routing_policy="round_robin") as running:
        yield running


def data_events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


async def test_a_dead_instance_is_left_out_at_once_and_readmitted_soon_after_it_returns(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(a.started())
        life = AsyncExitStack()
        await life.enter_async_context(b.started())
        instances = [{"id": "a", "url": a.url}, {"id": "b", "url": b.url}]
        gateway = await stack.enter_async_context(
            running_gateway(tmp_path, instances=instances, routing_policy="round_robin", health_interval_s=0.5)
        )
        await gateway.usable(2)
        port = b.port
        await life.aclose()
        for _ in range(6):
            async with gateway.post(CHAT, chat()) as answer:
                assert answer.status == 200
                assert answer.headers["x-kvgate-instance"] == "a"
        retried = await gateway.metric('kvgate_retries_total{cause="connect"}')
        assert retried <= 1
        await gateway.usable(1)
        await stack.enter_async_context(b.started(port))
        started = asyncio.get_running_loop().time()
        await gateway.usable(2)
        assert asyncio.get_running_loop().time() - started < 3
        seen = set()
        for _ in range(2):
            async with gateway.post(CHAT, chat()) as answer:
                seen.add(answer.headers["x-kvgate-instance"])
        assert seen == NAMES


@pytest.mark.parametrize("how", [{"status": 503}, {"status": 502}, {"die_after": 0}])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_instance_did_not_take_is_tried_on_the_other_one(
    fleet: Fleet, *, how: dict[str, object], stream: bool
) -> None:
    fleet.engines["a"].default = Script(**how)  # type: ignore[arg-type]
    for _ in range(2):
        async with fleet.gateway.post(CHAT, chat(stream=stream)) as answer:
            assert answer.status == 200
            assert answer.headers["x-kvgate-instance"] == "b"
            await answer.read()
    assert [len(engine.requests) for engine in fleet.engines.values()] == [2, 2]
    async with fleet.gateway.get("/metrics") as answer:
        assert "kvgate_retries_total{" in await answer.text()


@pytest.mark.parametrize(("how", "status"), [({"status": 503}, 503), ({"die_after": 0}, 502)])
async def test_when_nobody_takes_it_the_client_gets_the_last_refusal_and_each_was_asked_once(
    fleet: Fleet, how: dict[str, object], status: int
) -> None:
    async with fleet.gateway.post(CHAT, chat(), x_script=script(**how)) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["message"]
    assert [len(engine.requests) for engine in fleet.engines.values()] == [1, 1]


async def test_a_request_that_engines_die_under_is_given_up_after_the_second(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {name: ScriptedEngine() for name in "abcd"}, max_attempts=4) as fleet:
        async with fleet.gateway.post(CHAT, chat(), x_script=script(die_after=0)) as answer:
            assert answer.status == 502
        assert fleet.requests == 2
        async with fleet.gateway.post(CHAT, chat(), x_script=script(status=503)) as answer:
            assert answer.status == 503
        assert fleet.requests == 2 + 4


async def test_retries_stop_when_their_budget_is_spent(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, retry_budget_ratio=0.0) as fleet:
        async with fleet.gateway.post(CHAT, chat(), x_script=script(status=503)) as answer:
            assert answer.status == 503
        assert fleet.requests == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("how", [{"die_after": 3}, {"die_after": 3, "split": 7}])
async def test_a_stream_whose_engine_dies_ends_with_an_error_event_and_done(
    fleet: Fleet, path: str, how: dict[str, object]
) -> None:
    async with fleet.gateway.post(path, chat(stream=True, prompt="x"), x_script=script(**how)) as answer:
        assert answer.status == 200
        events = data_events(await answer.text())
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert error["type"] == "upstream_error"
    assert error["code"] == "upstream_cut"
    assert error["message"]
    assert all(json.loads(event)["choices"] for event in events[:-2])
    assert len(events) == 5
    operation = "chat_completions" if path == CHAT else "completions"
    await fleet.gateway.counted(f'kvgate_requests_total{{operation="{operation}",outcome="upstream_error"}}', 1)


async def test_a_stream_that_lacks_its_done_alone_is_given_it_and_is_no_failure(fleet: Fleet) -> None:
    async with fleet.gateway.post(CHAT, chat(stream=True), x_script=script(no_done=True)) as answer:
        events = data_events(await answer.text())
    assert events[-1] == "[DONE]"
    assert [event for event in events[:-1] if "error" in json.loads(event)] == []
    await fleet.gateway.counted('kvgate_requests_total{operation="chat_completions",outcome="ok"}', 1)


async def test_a_stream_is_over_at_its_done_whatever_the_engine_does_with_the_connection(fleet: Fleet) -> None:
    for path, body in ((CHAT, chat(stream=True)), (COMPLETIONS, {"model": MODEL, "prompt": "x", "stream": True})):
        async with fleet.gateway.post(path, body, x_script=script(hold_open=True)) as answer:
            events = data_events(await answer.text())
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        assert all("error" not in json.loads(event) for event in events[:-1])
        operation = "chat_completions" if path == CHAT else "completions"
        await fleet.gateway.counted(f'kvgate_requests_total{{operation="{operation}",outcome="ok"}}', 1)
    await eventually(lambda: fleet.active == 0)


async def test_an_engines_own_error_event_passes_and_counts_as_a_failure(fleet: Fleet) -> None:
    async with fleet.gateway.post(CHAT, chat(stream=True), x_script=script(error_event=True)) as answer:
        events = data_events(await answer.text())
    assert json.loads(events[-2])["error"]["message"] == "engine broke"
    assert events[-1] == "[DONE]"
    await fleet.gateway.counted('kvgate_requests_total{operation="chat_completions",outcome="upstream_error"}', 1)


async def test_a_whole_answer_that_is_cut_is_a_502_and_not_half_a_json(fleet: Fleet) -> None:
    async with fleet.gateway.post(CHAT, chat(), x_script=script(die_after=1)) as answer:
        assert answer.status == 502
        assert (await answer.json())["error"]["type"] == "upstream_error"


async def test_an_engine_that_never_answers_is_a_504_and_harms_nobody_else(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, first_byte_timeout_s=0.5) as fleet:
        stuck = asyncio.create_task(_status(fleet, script(ttft_s=3600)))
        for _ in range(5):
            async with fleet.gateway.post(CHAT, chat()) as answer:
                assert answer.status == 200
        assert await stuck == 504
        await eventually(lambda: fleet.active == 0)


async def test_an_engine_that_falls_silent_within_a_stream_ends_in_an_error_event(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, idle_timeout_s=0.3) as fleet:
        async with fleet.gateway.post(CHAT, chat(stream=True), x_script=script(stall_after=2)) as answer:
            events = data_events(await answer.text())
        assert json.loads(events[-2])["error"]["code"] == "upstream_timeout"
        assert len(events) == 4
        await eventually(lambda: fleet.active == 0)


async def test_a_request_that_waits_for_an_engine_that_hangs_goes_to_another_one(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, routing_policy="round_robin", health_timeout_s=0.3) as fleet:
        a = fleet.engines["a"]
        a.default = Script(ttft_s=3600)
        waiting = asyncio.create_task(_answered_by(fleet))
        await eventually(lambda: a.active == 1)
        a.silent = True
        assert await waiting == (200, "b")
        await eventually(lambda: a.active == 0)
        assert await fleet.gateway.metric('kvgate_retries_total{cause="hung"}') == 1


def _stats_gone(engine: ScriptedEngine) -> None:
    engine.stats_failures = 10**6


def _health_bad(engine: ScriptedEngine) -> None:
    engine.healthy = False


@pytest.mark.parametrize("broken", [_stats_gone, _health_bad], ids=["stats 503", "health 503"])
async def test_an_engine_that_hangs_behind_a_live_server_loses_what_waits_there_and_comes_back(
    tmp_path: Path, broken: Callable[[ScriptedEngine], None]
) -> None:
    async with running_fleet(tmp_path, routing_policy="round_robin", health_timeout_s=2.0) as fleet:
        a = fleet.engines["a"]
        a.default = Script(ttft_s=3600)
        stream = asyncio.create_task(_events(fleet, script(stall_after=2)))
        await eventually(lambda: a.active == 1)
        waiting = [asyncio.create_task(_answered_by(fleet)) for _ in range(4)]
        await eventually(lambda: a.active == 3)
        broken(a)
        assert await asyncio.gather(*waiting) == [(200, "b")] * 4
        await fleet.gateway.usable(1)
        async with fleet.gateway.get("/readyz") as answer:
            said = (await answer.json())["instances"]["a"]
        assert said["state"] == "unhealthy"
        assert "503" in said["reason"]
        for _ in range(2):
            assert await _answered_by(fleet) == (200, "b")
        events = await stream
        assert json.loads(events[-2])["error"]["code"] == "upstream_timeout"
        assert len(events) == 4
        await eventually(lambda: a.active == 0)
        assert await fleet.gateway.metric('kvgate_retries_total{cause="hung"}') == 2
        a.healthy, a.stats_failures, a.default = True, 0, Script()
        await fleet.gateway.usable(2)
        assert {(await _answered_by(fleet))[1] for _ in range(2)} == NAMES


async def test_a_request_that_hangs_two_engines_is_given_up(tmp_path: Path) -> None:
    async with running_fleet(
        tmp_path, {name: ScriptedEngine() for name in "abc"}, max_attempts=4, health_timeout_s=2.0
    ) as fleet:
        waiting = asyncio.create_task(_status(fleet, script(ttft_s=3600)))
        for _ in range(2):
            await eventually(lambda: fleet.active == 1)
            victim = next(engine for engine in fleet.engines.values() if engine.active)
            _stats_gone(victim)
            await eventually(lambda victim=victim: victim.active == 0)  # type: ignore[misc]
        assert await waiting == 502
        assert fleet.requests == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"load": {"running": -1}}, "load.running is -1; it is from 0"),
        ({"events": {"seq": -2}}, "events.seq is -2; it is from -1"),
        ({"events": {"endpoint": "ipc://../up"}}, "events.endpoint is 'ipc://../up'; it is tcp://host:port"),
    ],
)
async def test_a_report_that_can_not_be_true_is_a_failed_check_with_its_reason(
    tmp_path: Path, changes: dict[str, dict[str, object]], said: str
) -> None:
    async with running_fleet(tmp_path) as fleet:
        fleet.engines["a"].stats_changes = changes
        await fleet.gateway.usable(1)
        async with fleet.gateway.get("/readyz") as answer:
            assert said in (await answer.json())["instances"]["a"]["reason"]
        fleet.engines["a"].stats_changes = {}
        await fleet.gateway.usable(2)


async def test_an_instance_whose_tiers_keep_nothing_is_used_and_says_why(tmp_path: Path) -> None:
    failing = OffloadStats(
        loads=0,
        failed_loads=0,
        declined_loads=0,
        saves=9,
        tail_saves=0,
        looked_up_tokens=0,
        found_tokens=0,
        collisions=0,
        prefill_tokens_per_s=0.0,
        outcomes={},
        losses={},
        paths={},
        guard_errors=9,
        worker_faults=0,
        failed_saves_in_a_row=9,
        save_failure="blocks can't be saved: device",
    )

    async def reason(fleet: Fleet) -> str:
        async with fleet.gateway.get("/readyz") as answer:
            return str((await answer.json())["instances"]["a"]["reason"])

    async with running_fleet(tmp_path) as fleet:
        fleet.engines["a"].stats_changes = {"offload": msgspec.to_builtins(failing)}
        wanted = "healthy; its tiers keep nothing: blocks can't be saved: device"
        while await reason(fleet) != wanted:
            await asyncio.sleep(0.05)
        await fleet.gateway.usable(2)
        fleet.engines["a"].stats_changes = {"offload": msgspec.to_builtins(failing) | {"save_failure": ""}}
        while await reason(fleet) != "health check passed":
            await asyncio.sleep(0.05)


async def test_an_instance_whose_blocks_are_never_learned_is_used_by_load_and_says_why(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.snapshot_fails = True
    async with running_fleet(tmp_path, {"a": engine}) as fleet:
        async with fleet.gateway.get("/readyz") as answer:
            said = await answer.json()
        assert (answer.status, said["usable"], said["blocks_known"]) == (200, 1, 0)
        assert "snapshot_failed: status 503; it is routed by load" in said["instances"]["a"]["blocks"]
        assert await _answered_by(fleet) == (200, "a")
        engine.snapshot_fails = False

        async def known() -> bool:
            async with fleet.gateway.get("/readyz") as answer:
                return bool((await answer.json())["blocks_known"] == 1)

        await eventually(known)


async def test_a_client_that_does_not_read_its_answer_is_given_up(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, send_timeout_s=0.5) as fleet:
        host, port = fleet.gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(chat(stream=True)).encode()
        how = script(chunks=4000, text="x" * 7_000)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-script: {how}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await eventually(lambda: fleet.aborted == 1)
        await fleet.gateway.counted('kvgate_requests_total{operation="chat_completions",outcome="cancelled"}', 1)
        writer.close()
        await writer.wait_closed()


@contextmanager
def _black_hole() -> Iterator[int]:
    """A port whose listener never accepts and whose queue is full: connecting takes for ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.settimeout(0)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        yield port
        for filler in fillers:
            filler.close()


async def test_an_instance_that_can_not_be_connected_to_keeps_nobody_waiting(tmp_path: Path) -> None:
    with _black_hole() as port:
        async with ScriptedEngine().started() as good:
            instances = [{"id": "a", "url": f"http://127.0.0.1:{port}"}, {"id": "b", "url": good.url}]
            async with running_gateway(tmp_path, instances=instances, health_timeout_s=0.3) as gateway:
                await gateway.usable(1)
                async with gateway.post(CHAT, chat()) as answer:
                    assert answer.headers["x-kvgate-instance"] == "b"


@pytest.mark.parametrize(
    ("stream", "how"),
    [
        (True, {"ttft_s": 30}),
        (False, {"ttft_s": 30}),
        (True, {"chunks": 1000, "chunk_s": 0.05}),
    ],
    ids=["before the first token", "whole answer", "mid-stream"],
)
async def test_a_client_that_leaves_stops_the_engine_at_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, *, stream: bool, how: dict[str, object]
) -> None:
    caplog.set_level(logging.INFO, logger="gateway.request")
    host, port = fleet.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(chat(stream=stream)).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nx-script: {script(**how)}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    if "chunks" in how:
        await reader.readuntil(b"tok3")
    else:
        await eventually(lambda: fleet.active == 1)
    writer.close()
    await writer.wait_closed()
    await eventually(lambda: fleet.active == 0 and fleet.aborted == 1, deadline_s=10)
    await fleet.gateway.counted('kvgate_requests_total{operation="chat_completions",outcome="cancelled"}', 1)
    for name in NAMES:
        await fleet.gateway.counted(f'kvgate_requests_in_flight{{instance="{name}"}}', 0)
    (logged,) = [record.__dict__[FIELDS] for record in caplog.records if record.name == "gateway.request"]
    assert logged["status"] == (200 if "chunks" in how else 499)


async def test_in_flight_returns_to_zero_after_a_mix_of_everything(fleet: Fleet) -> None:
    ways = [
        {},
        {"status": 500},
        {"status": 503},
        {"die_after": 0},
        {"die_after": 2},
        {"ttft_s": 30},
    ]

    async def one(number: int) -> None:
        try:
            async with asyncio.timeout(None if number % len(ways) != 5 else 0.2):
                await _status(fleet, script(**ways[number % len(ways)]), stream=bool(number % 2))
        except TimeoutError:
            pass

    await asyncio.gather(*(one(number) for number in range(120)))
    await eventually(lambda: fleet.active == 0)
    for name in NAMES:
        await fleet.gateway.counted(f'kvgate_requests_in_flight{{instance="{name}"}}', 0)


@pytest.mark.parametrize("text", [False, True], ids=["token ids", "text without a tokenizer"])
async def test_a_plain_openai_engine_keeps_prompts_where_they_went_and_gets_new_ones_in_turn(
    tmp_path: Path, *, text: bool
) -> None:
    async with running_fleet(
        tmp_path, {"a": ScriptedEngine(kv=False), "b": ScriptedEngine(kv=False)}, route_memory_s=0
    ) as fleet:
        homes: dict[int, str] = {}
        for turn, asked in enumerate(([0, 1, 2, 3], [2, 3])):
            for number in asked:
                prompt = f"{number} " * 2000 if text else [number] * 300
                async with fleet.gateway.post(COMPLETIONS, {"model": MODEL, "prompt": prompt}) as answer:
                    assert answer.status == 200
                    route, instance = answer.headers["x-kvgate-route"], answer.headers["x-kvgate-instance"]
                if turn == 0:
                    assert route == "load;matched=0;reason=cold"
                    homes[number] = instance
                else:  # and then the engine says that nothing was cached
                    assert (route.partition(";")[0], instance) == ("prefix", homes[number])
        assert sorted(homes.values()) == ["a", "a", "b", "b"]
        assert await fleet.gateway.metric("kvgate_overestimated_tokens_total") > 0


async def _events(fleet: Fleet, how: str) -> list[str]:
    async with fleet.gateway.post(CHAT, chat(stream=True), x_script=how) as answer:
        return data_events(await answer.text())


async def _answered_by(fleet: Fleet) -> tuple[int, str]:
    async with fleet.gateway.post(CHAT, chat()) as answer:
        return answer.status, answer.headers["x-kvgate-instance"]


async def _status(fleet: Fleet, how: str, *, stream: bool = False) -> int:
    async with fleet.gateway.post(CHAT, chat(stream=stream), x_script=how) as answer:
        await answer.read()
        return int(answer.status)


async def test_a_redirection_is_a_failure_of_the_instance_and_its_address_stays_inside(tmp_path: Path) -> None:
    inside = "http://10.0.0.1:9/v1/chat/completions"
    async with running_fleet(tmp_path, {"a": ScriptedEngine(), "b": ScriptedEngine()}) as fleet:
        fleet.engines["a"].default = Script(status=307, location=inside)
        for _ in range(4):
            async with fleet.gateway.post(CHAT, chat()) as answer:
                assert (answer.status, answer.headers["x-kvgate-instance"]) == (200, "b")
        fleet.engines["b"].default = Script(status=302, location=inside)
        async with fleet.gateway.post(CHAT, chat()) as answer:
            text = await answer.text()
            assert answer.status == 502, text
            assert "redirection" in text
            assert "location" not in answer.headers
            assert "10.0.0.1" not in text
