"""Plans walked over scripted prefill and decode instances: who is called with what, and what if that fails."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcontrol.core.pd import PD_HEADER, Fetch, Hold, Load, PdDuty, Save, parse_pd_header
from kvcontrol.core.roles import EngineRole, KVTransport
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import COMPLETIONS, Fleet, running_fleet
from tests.support.running_gateway import eventually, running_gateway
from tests.support.scripted_engine import MODEL, Script, ScriptedEngine

LONG = list(range(300))
SHORT = list(range(1000, 1050))


def engine(role: EngineRole) -> ScriptedEngine:
    made = ScriptedEngine()
    made.role = role
    made.transports = {KVTransport.MIGRATION: "tcp"}
    made.held_at = "127.0.0.1:7777" if role is EngineRole.PREFILL else ""
    return made


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    engines = {"p": engine(EngineRole.PREFILL), "d": engine(EngineRole.DECODE)}
    async with running_fleet(
        tmp_path, engines, admin_key=ADMIN_KEY, pd_min_uncached_tokens=100, prefill_max_requests=1, route_memory_s=0
    ) as running:
        yield running


class Answered(NamedTuple):
    status: int
    instance: str
    route: str


async def ask(fleet: Fleet, prompt: list[int], **headers: str) -> Answered:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    async with fleet.gateway.post(COMPLETIONS, body, **headers) as answer:
        await answer.read()
        told = answer.headers
        return Answered(answer.status, told.get("x-kvgate-instance", ""), told.get("x-kvgate-route", ""))


def parts(one: ScriptedEngine) -> list[PdDuty | None]:
    """What each request that came to an engine was told of its part."""
    return [parse_pd_header(each[PD_HEADER]) if PD_HEADER in each else None for each in one.headers]


async def test_a_long_prompt_is_held_by_one_and_fetched_and_answered_by_the_other(fleet: Fleet) -> None:
    answered = await ask(fleet, LONG)
    assert (answered.status, answered.instance) == (200, "d")
    assert answered.route.endswith(";pd=separated;prefill=p")
    (hold,), (fetch,) = parts(fleet.engines["p"]), parts(fleet.engines["d"])
    assert isinstance(hold, Hold)
    assert isinstance(fetch, Fetch)
    assert fetch.ticket == hold.ticket
    assert fetch.source == "127.0.0.1:7777"
    await fleet.gateway.counted('kvgate_separations_total{reason="separated"}', 1)
    await fleet.gateway.counted("kvgate_separated_prefill_seconds_count", 1)


async def test_through_the_tiers_a_prompt_is_saved_by_one_and_loaded_by_the_other(tmp_path: Path) -> None:
    engines = {"p": engine(EngineRole.PREFILL), "d": engine(EngineRole.DECODE)}
    for one in engines.values():
        one.transports = {KVTransport.TIERS: "tcp;layout"}
    async with running_fleet(tmp_path, engines, pd_min_uncached_tokens=100, route_memory_s=0) as fleet:
        answered = await ask(fleet, LONG)
        assert answered.route.endswith(";pd=separated;prefill=p")
        assert parts(engines["p"]) == [Save()]
        assert parts(engines["d"]) == [Load(host="127.0.0.1", port=7777)]


@pytest.fixture
async def tiered(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Hybrid engines between which prompts go through the tiers: who prefills is the gateway's word alone."""
    engines = {"p": engine(EngineRole.HYBRID), "d": engine(EngineRole.HYBRID)}
    for one in engines.values():
        one.transports = {KVTransport.TIERS: "tcp;layout"}
        one.held_at = "127.0.0.1:7777"
    async with running_fleet(
        tmp_path, engines, admin_key=ADMIN_KEY, pd_min_uncached_tokens=100, route_memory_s=0
    ) as running:
        await Admin(running.gateway).ok("PUT", "/instances/p", {"role": "prefill"})
        await Admin(running.gateway).ok("PUT", "/instances/d", {"role": "decode"})
        yield running


async def test_through_the_tiers_the_loss_of_either_side_leaves_whole_requests_to_the_other(tiered: Fleet) -> None:
    assert (await ask(tiered, LONG)).route.endswith(";pd=separated;prefill=p")
    tiered.engines["d"].default = Script(status=503)  # it refuses, then is left alone, then is gone
    for number in range(8):
        answered = await ask(tiered, [9000 + number * 1000 + token for token in LONG])
        assert (answered.status, answered.instance) == (200, "p"), answered
        assert "prefill=p" not in answered.route
    await Admin(tiered.gateway).ok("POST", "/instances/d/drain")
    assert (await ask(tiered, LONG)).instance == "p"
    assert (await ask(tiered, SHORT)).instance == "p"
    tiered.engines["d"].default = Script()
    await Admin(tiered.gateway).ok("POST", "/instances/d/resume")
    await Admin(tiered.gateway).ok("POST", "/instances/p/drain")

    async def answers_alone() -> bool:
        return (await ask(tiered, LONG)).instance == "d"

    await eventually(answers_alone)


async def test_a_role_changes_at_run_time_where_prompts_go_through_the_tiers_and_stays_said(tiered: Fleet) -> None:
    admin = Admin(tiered.gateway)
    await admin.ok("PUT", "/instances/d", {"role": "prefill"})
    await admin.ok("PUT", "/instances/p", {"role": "decode"})
    assert (await ask(tiered, LONG)).route.endswith(";pd=separated;prefill=d")
    said = await admin.ok("POST", "/instances/p/drain")
    assert said["role"] == "decode"
    await admin.ok("POST", "/instances/p/resume")
    await admin.ok("PUT", "/instances/d", {})
    await admin.ok("PUT", "/instances/p", {})
    assert "pd=" not in (await ask(tiered, [7000 + token for token in LONG])).route
    assert {each["role"] for each in (await admin.ok("GET", "/instances"))["data"]} == {"hybrid"}


async def test_a_drain_keeps_the_role_that_somebody_else_sets_at_the_same_time(tiered: Fleet) -> None:
    admin = Admin(tiered.gateway)
    for role in ("decode", "prefill", "decode", "prefill"):
        said = {"role": role, "draining": True}
        await asyncio.gather(admin.ok("PUT", "/instances/p", said), admin.ok("POST", "/instances/p/drain"))
        shown = await admin.ok("GET", "/instances/p")
        assert (shown["role"], shown["draining"]) == (role, True)


@pytest.mark.parametrize("role", ["hybrid", "decode"])
async def test_another_role_than_an_engine_s_own_is_refused_with_what_to_do(fleet: Fleet, role: str) -> None:
    status, _, said = await Admin(fleet.gateway).call("PUT", "/instances/p", {"role": role})
    assert (status, said["error"]["code"]) == (409, "role_is_fixed")
    assert "p is a prefill instance for its life" in said["error"]["message"]
    assert f"start it again with --role {role}" in said["error"]["message"]
    await Admin(fleet.gateway).ok("PUT", "/instances/p", {"role": "prefill"})


async def test_a_hybrid_engine_that_hands_nothing_over_gets_no_other_role(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, {"a": ScriptedEngine()}, admin_key=ADMIN_KEY) as fleet:
        status, _, said = await Admin(fleet.gateway).call("PUT", "/instances/a", {"role": "prefill"})
        assert (status, said["error"]["code"]) == (409, "role_is_fixed")
        assert "KVGATE_ENGINE_PD_TRANSPORT=tiers" in said["error"]["message"]


async def test_the_role_of_an_instance_that_was_never_reached_is_the_one_it_was_named_with_or_none(
    tmp_path: Path,
) -> None:
    gone = [{"id": "n", "url": "http://127.0.0.1:9"}, {"id": "m", "url": "http://127.0.0.1:10", "role": "prefill"}]
    async with running_gateway(tmp_path, instances=gone, admin_key=ADMIN_KEY) as gateway:
        listed = (await Admin(gateway).ok("GET", "/instances"))["data"]
        assert {each["id"]: each["role"] for each in listed} == {"n": None, "m": "prefill"}
        async with gateway.session.get(f"{gateway.url}/readyz") as answer:
            assert answer.status == 503


async def test_a_short_prompt_is_answered_whole_and_no_prefill_instance_is_ever_asked_to_answer(fleet: Fleet) -> None:
    for _ in range(3):
        assert (await ask(fleet, SHORT)).route.endswith(";pd=short")
    assert parts(fleet.engines["d"]) == [None, None, None]
    assert fleet.engines["p"].requests == []


async def test_a_prompt_that_the_answering_side_holds_is_computed_there(fleet: Fleet) -> None:
    await ask(fleet, LONG)
    await fleet.gateway.counted('kvgate_resident_blocks{instance="d",tier="HBM"}', 18)
    assert (await ask(fleet, [*LONG, *range(2000, 2040)])).route.endswith(";pd=held")
    assert len(fleet.engines["p"].requests) == 1


async def test_a_prefill_instance_that_has_what_it_may_have_is_passed_over(fleet: Fleet) -> None:
    fleet.engines["p"].default = Script(ttft_s=300)
    first = asyncio.create_task(ask(fleet, LONG))
    await eventually(lambda: fleet.engines["p"].active == 1)
    second = await ask(fleet, [9000 + token for token in LONG])
    assert (second.status, second.instance) == (200, "d")
    assert second.route.endswith(";pd=prefill_busy")
    first.cancel()
    await eventually(lambda: fleet.engines["p"].active == 0)
    fleet.engines["p"].default = Script()
    assert (await ask(fleet, [5000 + token for token in LONG])).route.endswith(";pd=separated;prefill=p")


@pytest.mark.parametrize("failure", [Script(die_after=0), Script(status=503), Script(status=500), Script(status=400)])
async def test_a_prompt_that_nobody_could_hold_is_computed_where_it_is_answered(fleet: Fleet, failure: Script) -> None:
    fleet.engines["p"].default = failure
    answered = await ask(fleet, LONG)
    assert (answered.status, answered.instance) == (200, "d")
    assert parts(fleet.engines["d"]) == [None]


async def test_without_anybody_to_answer_a_request_is_refused_and_not_given_to_a_prefill_instance(fleet: Fleet) -> None:
    await Admin(fleet.gateway).ok("POST", "/instances/d/drain")
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 4}
    async with fleet.gateway.post(COMPLETIONS, body) as answer:
        assert answer.status == 503
        message = (await answer.json())["error"]["message"]
    assert message.endswith(
        ": p can only prefill for others (LMDeploy's role), and no decode or hybrid instance is there to answer"
    )
    async with fleet.gateway.session.get(f"{fleet.gateway.url}/readyz") as answer:
        assert (answer.status, (await answer.json())["status"]) == (503, "no usable instance answers")
    assert fleet.engines["p"].requests == []


async def test_a_drained_prefill_instance_computes_nothing(fleet: Fleet) -> None:
    await Admin(fleet.gateway).ok("POST", "/instances/p/drain")
    assert "pd=" not in (await ask(fleet, LONG)).route
    assert fleet.engines["p"].requests == []


async def test_several_answers_are_not_separated(fleet: Fleet) -> None:
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 4, "n": 2}
    async with fleet.gateway.post(COMPLETIONS, body) as answer:
        assert answer.headers["x-kvgate-route"].endswith(";pd=unknown_prompt")


async def test_an_explanation_shows_the_separated_plan(fleet: Fleet) -> None:
    said = await Admin(fleet.gateway).ok("POST", "/explain", {"model": MODEL, "prompt": LONG})
    assert said["separation"] == {
        "prefill": "p",
        "reason": "separated",
        "transport": "migration",
        "uncached_tokens": 300,
    }
    assert said["plan"] == (
        "%kv = prefill @p {request=explained, start=0, end=300}\n"
        "%moved = transfer(%kv) @p {request=explained, start=0, end=300, target=d, transport=migration}\n"
        "evict(%kv) @p {request=explained, reason=handed_over}\n"
        "%answer, %tail = decode(%moved) @d {request=explained, start=300, max_tokens=256}\n"
        "results %answer, %tail\n"
    )
    assert said["left_out"] == [{"instance": "p", "why": "it computes prompts for others and answers nothing itself"}]
    assert {each["id"]: each["role"] for each in (await Admin(fleet.gateway).ok("GET", "/instances"))["data"]} == {
        "p": "prefill",
        "d": "decode",
    }
