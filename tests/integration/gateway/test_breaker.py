"""Instances that pass their health checks and fail requests, and announcements that answers contradict."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, running_fleet
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL, Script, ScriptedEngine


async def ask(fleet: Fleet) -> tuple[int, str]:
    async with fleet.gateway.post(CHAT, chat()) as answer:
        await answer.read()
        return answer.status, str(answer.headers.get("x-kvgate-instance", ""))


async def test_an_instance_that_drops_requests_is_left_alone_tried_again_and_used_when_it_answers(
    tmp_path: Path,
) -> None:
    async with running_fleet(
        tmp_path, routing_policy="round_robin", admin_key=ADMIN_KEY, breaker_failures=3, breaker_pause_s=0.2
    ) as fleet:
        a, admin = fleet.engines["a"], Admin(fleet.gateway)
        a.default = Script(die_after=0)
        assert {(await ask(fleet)) for _ in range(20)} == {(200, "b")}
        shown = await admin.ok("GET", "/instances/a")
        assert (shown["state"], shown["breaker"] in {"open", "half_open"}) == ("healthy", True)
        assert "closed the connection" in shown["breaker_reason"]
        assert len(a.requests) < 10
        a.default = Script()

        async def used_again() -> bool:
            return (await ask(fleet)) == (200, "a")

        await eventually(used_again)
        assert Counter([(await ask(fleet))[1] for _ in range(10)]) == {"a": 5, "b": 5}
        assert (await admin.ok("GET", "/instances/a"))["breaker"] == "closed"


@pytest.mark.parametrize("comes_back", [True, False])
async def test_while_the_only_instance_is_on_trial_requests_wait_for_the_outcome(
    tmp_path: Path, *, comes_back: bool
) -> None:
    async with running_fleet(
        tmp_path, {"a": ScriptedEngine()}, admin_key=ADMIN_KEY, breaker_failures=1, breaker_pause_s=0.2
    ) as fleet:
        a, admin = fleet.engines["a"], Admin(fleet.gateway)
        a.default = Script(die_after=0)
        assert (await ask(fleet))[0] == 502

        async def half_open() -> bool:
            return bool((await admin.ok("GET", "/instances/a"))["breaker"] == "half_open")

        await eventually(half_open)
        before = len(a.requests)
        gate = a.gate = asyncio.Event()
        a.default = Script() if comes_back else Script(die_after=0)

        async def one() -> tuple[int, bool]:
            async with fleet.gateway.post(CHAT, chat()) as answer:
                await answer.read()
                return answer.status, "retry-after" in answer.headers

        asked = [asyncio.create_task(one()) for _ in range(6)]

        async def all_wait() -> bool:
            return await fleet.gateway.metric("kvgate_requests_waiting") + a.active == 6

        await eventually(all_wait)
        trials = len(a.requests) - before
        assert 1 <= trials < 6
        gate.set()
        answers = Counter(await asyncio.gather(*asked))
        if comes_back:
            assert answers == {(200, False): 6}
        else:
            assert answers == {(502, False): trials, (503, True): 6 - trials}
            assert len(a.requests) - before == trials


async def test_an_instance_that_alone_answers_500_is_ejected_and_one_among_others_that_do_too_is_not(
    tmp_path: Path,
) -> None:
    async with running_fleet(tmp_path, routing_policy="round_robin", admin_key=ADMIN_KEY, breaker_pause_s=60) as fleet:
        admin = Admin(fleet.gateway)
        fleet.engines["a"].default = Script(status=500)
        statuses = Counter([(await ask(fleet))[0] for _ in range(40)])
        assert statuses[500] < 10
        assert (await admin.ok("GET", "/instances/a"))["breaker"] == "open"
        assert "of its answers failed lately" in (await admin.ok("GET", "/instances/a"))["breaker_reason"]
    everybody = {name: ScriptedEngine() for name in "ab"}
    for engine in everybody.values():
        engine.default = Script(status=500)
    async with running_fleet(tmp_path, everybody, routing_policy="round_robin", admin_key=ADMIN_KEY) as fleet:
        for _ in range(40):
            await ask(fleet)
        assert sum(len(engine.requests) for engine in everybody.values()) == 40
        assert (
            min(len(engine.requests) for engine in everybody.values()) >= 10
        )  # a late health check may take turns away
        for name in everybody:
            assert (await Admin(fleet.gateway).ok("GET", f"/instances/{name}"))["breaker"] == "closed"


async def test_an_instance_whose_answers_contradict_its_announcements_is_learned_anew(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, route_memory_s=0) as fleet:
        cache = fleet.engines["a"].cache
        assert cache is not None

        async def asked() -> tuple[int, int]:
            body: dict[str, Any] = {"model": MODEL, "prompt": list(range(100))}
            async with fleet.gateway.post(COMPLETIONS, body) as answer:
                usage = (await answer.json())["usage"]
                matched = int(answer.headers["x-kvgate-matched-tokens"])
                return matched, usage["prompt_tokens_details"]["cached_tokens"]

        await asked()
        await fleet.gateway.counted('kvgate_resident_blocks{instance="a",tier="HBM"}', 6)
        for _ in range(5):
            cache.resident.clear()  # without a word to anybody
            assert await asked() == (96, 0)
        await fleet.gateway.counted('kvgate_kv_resyncs_total{instance="a",reason="contradicted"}', 1)
        await fleet.gateway.counted("kvgate_overestimated_tokens_total", 5 * 96)
        await fleet.gateway.counted('kvgate_resident_blocks{instance="a",tier="HBM"}', 6)
        assert await asked() == (96, 96)
