import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.registry import (
    BreakerState,
    HealthLoop,
    InstanceSpec,
    InstanceState,
    LoadTracker,
    Model,
    ProbeResult,
    Registry,
)
from gateway.registry.checks import CheckRules
from gateway.registry.panic import Excuse, PanicRules
from gateway.upstream import Timeouts
from kvcontrol.core import CacheIdentity, Epoch, InstanceId
from kvcontrol.core.control import EventsInfo, InstanceStats, LoadStats, PrefixCacheStats
from kvcontrol.core.roles import EngineRole
from tests.support.control_client import control_client
from tests.support.scripted_engine import ScriptedEngine

A, B = InstanceId("a"), InstanceId("b")


@pytest.fixture
def registry() -> Registry:
    return Registry((spec("a", 1), spec("b", 2)), rules=CheckRules(unhealthy_after=2))


def spec(name: str, port: int) -> InstanceSpec:
    return InstanceSpec(id=InstanceId(name), url=f"http://127.0.0.1:{port}")


def stats(running: int = 0, waiting: int = 0, role: EngineRole = EngineRole.HYBRID) -> InstanceStats:
    return InstanceStats(
        epoch=Epoch("e"),
        engine="x",
        engine_version="1",
        device="cpu",
        started_at_s=0,
        context_length_tokens=1,
        identity=CacheIdentity(model="m", revision="r", kv_dtype="f", block_size_tokens=1),
        events=EventsInfo(endpoint="tcp://127.0.0.1:1", replay_endpoint="tcp://127.0.0.1:2", seq=-1),
        tiers={},
        load=LoadStats(running=running, waiting=waiting, max_batch_size=1),
        prefix_cache=PrefixCacheStats(query_tokens=0, hit_tokens=0),
        role=role,
    )


def probe(*cards: dict[str, Any], said: InstanceStats | None = None, in_flight: int = 0) -> ProbeResult:
    models = tuple(Model(id=card["id"], card=card) for card in cards)
    return ProbeResult(models=models, stats=said, stats_problem=None, in_flight=in_flight)


async def test_an_instance_starts_becomes_healthy_falls_ill_and_recovers(registry: Registry) -> None:
    def state() -> InstanceState:
        return registry.get(A).state

    assert state() is InstanceState.STARTING
    registry.checks.failed(A, "refused")
    registry.checks.failed(A, "refused")
    assert state() is InstanceState.STARTING
    registry.checks.succeeded(A, probe({"id": "m"}))
    assert state() is InstanceState.HEALTHY
    registry.checks.failed(A, "slow")
    assert state() is InstanceState.HEALTHY
    registry.checks.succeeded(A, probe({"id": "m"}))
    registry.checks.failed(A, "slow")
    assert state() is InstanceState.HEALTHY
    registry.checks.failed(A, "slow")
    assert state() is InstanceState.UNHEALTHY
    assert registry.get(A).reason == "slow"
    registry.checks.succeeded(A, probe({"id": "m"}))
    assert state() is InstanceState.HEALTHY


async def test_a_refused_connection_takes_an_instance_out_at_once_and_keeps_what_it_serves(registry: Registry) -> None:
    registry.checks.succeeded(A, probe({"id": "m"}, said=stats()))
    registry.checks.connection_failed(A, "refused")
    assert registry.available.usable() == ()
    assert registry.get(A).stats is None
    assert registry.models.knows("m")
    assert not registry.models.knows("n")


async def test_an_instance_with_a_cache_is_ready_once_its_blocks_are_known(registry: Registry) -> None:
    registry.settle(A)
    assert not registry.get(A).ready
    registry.checks.succeeded(A, probe(said=stats()))
    registry.checks.succeeded(B, probe())
    assert (registry.get(A).ready, registry.get(B).ready) == (False, True)
    assert len(registry.available.usable()) == 2
    registry.settle(A)
    registry.checks.succeeded(A, probe(said=stats(running=1)))
    assert registry.get(A).ready
    registry.checks.connection_failed(A, "gone")
    registry.checks.succeeded(A, probe(said=stats()))
    assert not registry.get(A).ready


async def test_an_instance_that_fails_its_checks_is_hung_until_a_good_one_and_one_that_refuses_is_not(
    registry: Registry,
) -> None:
    registry.checks.succeeded(A, probe())
    hung = registry.checks.hung(A)
    assert registry.checks.hung(A) is hung
    registry.checks.connection_failed(A, "refused")
    registry.checks.failed(A, "refused", may_drain=True)
    assert not hung.done()
    registry.checks.succeeded(A, probe())
    registry.checks.failed(A, "/health answered 503")
    assert not hung.done()
    registry.checks.failed(A, "/health answered 503")
    assert hung.done()
    assert registry.checks.hung(A) is hung
    registry.checks.succeeded(A, probe())
    assert not registry.checks.hung(A).done()


async def test_one_that_refused_and_then_answers_badly_is_hung_too(registry: Registry) -> None:
    registry.checks.succeeded(A, probe())
    hung = registry.checks.hung(A)
    registry.checks.connection_failed(A, "refused")
    registry.checks.failed(A, "no answer")
    assert hung.done()


async def test_an_instance_whose_blocks_can_not_be_learned_is_ready_and_says_so(registry: Registry) -> None:
    registry.checks.succeeded(A, probe(said=stats()))
    assert registry.get(A).blocks == "being learned"
    registry.settle(A, "snapshot_failed: status 503")
    assert (registry.get(A).ready, registry.get(A).blocks_known) == (True, False)
    assert "snapshot_failed: status 503" in registry.get(A).blocks
    registry.settle(A)
    assert (registry.get(A).ready, registry.get(A).blocks_known) == (True, True)
    registry.checks.connection_failed(A, "gone")
    assert not registry.get(A).blocks_known


async def test_cards_are_merged_by_id_over_usable_instances(registry: Registry) -> None:
    registry.checks.succeeded(A, probe({"id": "m", "x": 1}, {"id": "n"}))
    registry.checks.succeeded(B, probe({"id": "m", "x": 2, "y": 3}))
    assert registry.models.cards() == [{"id": "m", "x": 1, "y": 3}, {"id": "n"}]
    registry.checks.connection_failed(A, "gone")
    assert registry.models.cards() == [{"id": "m", "x": 2, "y": 3}]


async def test_foreign_requests_are_those_reported_beyond_our_own(registry: Registry) -> None:
    registry.checks.succeeded(A, probe(said=stats(running=3, waiting=2), in_flight=4))
    assert registry.get(A).foreign_requests == 1
    registry.checks.succeeded(A, probe(said=stats(running=1), in_flight=4))
    assert registry.get(A).foreign_requests == 0


async def test_waiting_for_a_change_ends_when_it_comes(registry: Registry) -> None:
    waiter = asyncio.create_task(registry.wait_until(lambda: bool(registry.available.usable())))
    await asyncio.sleep(0)
    assert not waiter.done()
    registry.checks.succeeded(B, probe())
    await asyncio.wait_for(waiter, 5)


async def healthy(registry: Registry) -> None:
    for instance in (A, B):
        registry.checks.succeeded(instance, probe({"id": "m"}))


async def test_an_instance_that_fails_requests_is_left_alone_and_never_all_of_them(registry: Registry) -> None:
    await healthy(registry)
    for _ in range(5):
        registry.breakers.failed(A, "cut")
    assert [each.id for each in registry.available.usable("m")] == [B]
    assert registry.breakers.state(A) is BreakerState.OPEN
    for _ in range(5):
        registry.breakers.failed(B, "cut")
    assert len(registry.available.usable("m")) == 1


async def test_an_instance_that_comes_back_gets_one_request_until_that_is_answered(registry: Registry) -> None:
    await healthy(registry)
    registry.checks.connection_failed(A, "refused")
    registry.checks.succeeded(A, probe({"id": "m"}))
    assert registry.breakers.state(A) is BreakerState.HALF_OPEN
    assert len(registry.available.usable()) == 2
    registry.breakers.picked(A)
    assert [each.id for each in registry.available.usable()] == [B]
    registry.breakers.answered(A)
    assert len(registry.available.usable()) == 2


async def test_while_all_wait_for_the_outcome_of_a_trial_nobody_is_asked(registry: Registry) -> None:
    await healthy(registry)
    for each in (A, B):
        registry.checks.connection_failed(each, "refused")
        registry.checks.succeeded(each, probe({"id": "m"}))
    registry.breakers.picked(A)
    assert [each.id for each in registry.available.usable("m")] == [B]
    assert not registry.available.on_trial("m")
    registry.breakers.picked(B)
    assert registry.available.usable("m") == ()
    assert registry.available.on_trial("m")
    assert 0 < registry.available.left_alone_s("m") <= 5
    assert [each.id for each in registry.available.serving("m")] == [A, B]
    assert registry.models.names() == ["m"]
    registry.breakers.failed(A, "cut")
    assert registry.available.usable("m") == (), "there is hope for the other one still"
    assert registry.available.on_trial("m")
    registry.breakers.failed(B, "cut")
    assert not registry.available.on_trial("m")
    assert len(registry.available.usable("m")) == 1, "when everybody fails, leaving everybody alone helps nobody"
    registry.breakers.answered(B)
    assert [each.id for each in registry.available.usable("m")] == [B]
    assert registry.available.left_alone_s("m") == 0


async def test_a_trial_by_which_nothing_is_learned_is_followed_by_the_next(registry: Registry) -> None:
    await healthy(registry)
    registry.checks.connection_failed(A, "refused")
    registry.checks.succeeded(A, probe({"id": "m"}))
    registry.breakers.picked(A)
    assert [each.id for each in registry.available.usable()] == [B]
    registry.breakers.answered_badly(A, "it answered 500")
    registry.breakers.ended(A)
    assert len(registry.available.usable()) == 2
    assert registry.available.on_probation(A)


async def test_one_that_answers_while_it_keeps_a_check_waiting_is_not_taken_out() -> None:
    now_s = 0.0
    registry = Registry((spec("a", 1), spec("b", 2)), rules=CheckRules(unhealthy_after=2), clock=lambda: now_s)
    await healthy(registry)
    for _ in range(9):
        began_s, now_s = now_s, now_s + 5
        registry.breakers.answered(A)
        registry.checks.failed(A, "slow", since_s=began_s)
        now_s += 1
    for _ in range(100):
        registry.checks.failed(A, "slow", since_s=now_s - 0.5)
    assert len(registry.available.usable()) == 2, "a hundred waits that were in vain together are one"
    began_s, now_s = now_s, now_s + 5
    registry.checks.failed(A, "slow", since_s=began_s)
    assert [each.id for each in registry.available.usable()] == [B]
    assert registry.get(A).reason == "slow"


async def test_of_instances_that_are_only_late_half_are_kept_and_that_not_for_ever() -> None:
    now_s = 0.0
    registry = Registry((spec("a", 1), spec("b", 2)), rules=CheckRules(unhealthy_after=2), clock=lambda: now_s)
    await healthy(registry)

    def late(*instances: InstanceId) -> list[InstanceId]:
        nonlocal now_s
        now_s += 10
        for each in instances:
            registry.checks.failed(each, "slow", since_s=now_s - 5)
        return [each.id for each in registry.available.usable()]

    assert late(A, B) == [A, B]
    assert late(A, B) == [B]
    assert registry.get(B).reason == "slow; it is kept in use, as too few others are well"
    assert not registry.checks.hung(B).done()
    assert late(A, B) == [B]
    assert late(A, B) == []
    assert registry.checks.excused[Excuse.TOO_FEW] == 2
    assert registry.checks.hung(B).done()


async def test_one_that_is_not_only_late_is_not_kept() -> None:
    now_s = 10.0
    registry = Registry((spec("a", 1),), rules=CheckRules(unhealthy_after=2), clock=lambda: now_s)
    registry.checks.succeeded(A, probe({"id": "m"}))
    registry.checks.failed(A, "answered 503")
    registry.checks.failed(A, "slow", since_s=5)
    assert registry.available.usable() == ()
    registry.checks.succeeded(A, probe({"id": "m"}))
    registry.checks.connection_failed(A, "refused")
    assert registry.available.usable() == ()


@pytest.mark.parametrize(("own_s", "excused"), [(0.0, 0), (0.04, 0), (0.06, 1)])
async def test_a_check_that_times_out_by_this_process_own_lag_does_not_count(own_s: float, excused: int) -> None:
    late = iter([1.0, 1.0 + own_s])
    timeouts = Timeouts(connect_s=60, first_byte_s=60, idle_s=60, hung_s=60)
    async with ScriptedEngine().started() as engine, control_client(connect_s=timeouts.connect_s) as client:
        engine.silent = True
        registry = Registry(
            (InstanceSpec(id=A, url=engine.url),), rules=CheckRules(unhealthy_after=1, panic=PanicRules(share=0))
        )
        registry.checks.succeeded(A, probe({"id": "m"}))
        health = HealthLoop(
            A,
            registry=registry,
            load=LoadTracker(),
            client=client,
            interval_s=1,
            timeout_s=0.1,
            lag_s=lambda: next(late),
        )
        await health.check()
    assert registry.checks.excused[Excuse.OWN_LAG] == excused
    assert len(registry.available.usable()) == excused


async def test_an_engine_that_reports_nothing_is_asked_for_its_report_when_it_came_and_seldom_after() -> None:
    async with ScriptedEngine(kv=False).started() as engine, control_client() as client:
        registry = Registry((InstanceSpec(id=A, url=engine.url),), rules=CheckRules(unhealthy_after=1))
        health = HealthLoop(A, registry=registry, load=LoadTracker(), client=client, interval_s=1, timeout_s=60)
        for _ in range(3):
            await health.check()
        assert (engine.stats_asked, registry.get(A).kv) == (1, False)
        assert "serves no /kv/v1" in registry.get(A).reason
        engine.healthy = False
        await health.check()
        engine.healthy = True
        await health.check()
        assert engine.stats_asked == 2


async def test_without_a_panic_threshold_nobody_is_kept() -> None:
    now_s = 10.0
    registry = Registry(
        (spec("a", 1),), rules=CheckRules(unhealthy_after=1, panic=PanicRules(share=0)), clock=lambda: now_s
    )
    registry.checks.succeeded(A, probe({"id": "m"}))
    registry.checks.failed(A, "slow", since_s=5)
    assert registry.available.usable() == ()


async def test_errors_that_only_one_instance_makes_eject_it_and_those_of_all_nobody(registry: Registry) -> None:
    await healthy(registry)
    for _ in range(10):
        registry.breakers.answered_badly(A, "it answered 500")
        registry.breakers.answered_badly(B, "it answered 500")
    assert len(registry.available.usable()) == 2
    registry = Registry((spec("a", 1), spec("b", 2)), rules=CheckRules(unhealthy_after=2))
    await healthy(registry)
    for _ in range(10):
        registry.breakers.answered(B)
        registry.breakers.answered_badly(A, "it answered 500")
    assert [each.id for each in registry.available.usable()] == [B]
    assert "100% of its answers failed lately, 0% of the others'" in registry.breakers.reason(A)


async def test_what_is_said_of_one_that_has_left_is_ignored(registry: Registry) -> None:
    await healthy(registry)
    hung = registry.checks.hung(A)
    registry.remove(A)
    registry.remove(A)
    registry.breakers.failed(A, "cut")
    registry.breakers.answered(A)
    registry.breakers.answered_badly(A, "500")
    registry.checks.connection_failed(A, "refused")
    registry.checks.failed(A, "refused")
    registry.checks.succeeded(A, probe())
    registry.settle(A)
    assert not hung.done()
    assert not registry.checks.hung(A).done()
    assert [each.id for each in registry.all()] == [B]


async def test_an_instance_that_computes_prompts_for_others_is_asked_for_no_answer(registry: Registry) -> None:
    registry.checks.succeeded(A, probe({"id": "m"}, said=stats(role=EngineRole.PREFILL)))
    registry.checks.succeeded(B, probe({"id": "m"}, said=stats(role=EngineRole.DECODE)))
    assert [each.id for each in registry.available.usable("m")] == [B]
    assert [each.id for each in registry.available.prefilling("m")] == [A]
    assert registry.available.prefilling("another") == ()
    registry.drain(A)
    assert registry.available.prefilling("m") == ()


async def test_an_instance_may_change_its_role(registry: Registry) -> None:
    registry.checks.succeeded(A, probe({"id": "m"}, said=stats(role=EngineRole.PREFILL)))
    registry.checks.succeeded(A, probe({"id": "m"}, said=stats()))
    assert [each.id for each in registry.available.usable("m")] == [A]
    assert registry.available.prefilling("m") == ()


async def test_what_an_instance_is_named_to_be_goes_before_what_it_says() -> None:
    named = InstanceSpec(id=A, url="http://127.0.0.1:1", role=EngineRole.PREFILL)
    registry = Registry((named,), rules=CheckRules(unhealthy_after=2))
    registry.checks.succeeded(A, probe({"id": "m"}, said=stats()))
    assert registry.get(A).role is EngineRole.PREFILL
    assert [each.id for each in registry.available.prefilling("m")] == [A]
    registry.remove(A)
    assert registry.available.prefilling("m") == ()


async def test_an_engine_in_a_role_of_its_own_stays_in_it_whatever_it_is_named() -> None:
    named = InstanceSpec(id=A, url="http://127.0.0.1:1", role=EngineRole.HYBRID)
    registry = Registry((named,), rules=CheckRules(unhealthy_after=2))
    registry.checks.succeeded(A, probe({"id": "m"}, said=stats(role=EngineRole.PREFILL)))
    registry.assign(A, EngineRole.DECODE)
    assert registry.get(A).role is EngineRole.PREFILL
    assert registry.available.usable("m") == ()
    assert [each.id for each in registry.available.only_prefilling("m")] == [A]


async def test_who_prefills_by_the_gateways_word_alone_answers_where_nobody_else_can(registry: Registry) -> None:
    for each in (A, B):
        registry.checks.succeeded(each, probe({"id": "m"}, said=stats()))
    registry.assign(A, EngineRole.PREFILL)
    assert [each.id for each in registry.available.usable("m")] == [B]
    registry.checks.connection_failed(B, "refused")
    assert [each.id for each in registry.available.usable("m")] == [A]
    assert registry.models.names() == ["m"]
    registry.assign(A, None)
    assert registry.get(A).role is EngineRole.HYBRID


async def test_a_role_that_an_instance_says_outlasts_a_check_at_which_it_says_nothing(registry: Registry) -> None:
    assert registry.get(A).known_role is None
    registry.checks.succeeded(A, probe({"id": "m"}, said=stats(role=EngineRole.PREFILL)))
    registry.checks.succeeded(A, replace(probe({"id": "m"}), kv=True, stats_problem="it can't be read"))
    assert registry.get(A).known_role is EngineRole.PREFILL


async def test_prompts_are_kept_from_a_prefill_instance_that_fails_them_unless_there_is_no_other(
    registry: Registry,
) -> None:
    for each in (A, B):
        registry.checks.succeeded(each, probe({"id": "m"}, said=stats(role=EngineRole.PREFILL)))
    for _ in range(5):
        registry.breakers.failed(A, "it refuses")
    assert [each.id for each in registry.available.prefilling("m")] == [B]
    for _ in range(5):
        registry.breakers.failed(B, "it refuses")
    assert registry.available.prefilling("m")


async def test_a_model_may_be_served_until_every_instance_has_listed_its_models() -> None:
    registry = Registry((spec("a", 1), spec("b", 2)), rules=CheckRules(unhealthy_after=1))
    registry.checks.succeeded(A, probe({"id": "m"}))
    assert registry.models.may_serve("m")
    assert registry.models.may_serve("n")
    registry.checks.failed(B, "refused")
    assert registry.models.may_serve("n")
    registry.checks.succeeded(B, probe())
    assert not registry.models.may_serve("n")
    registry.checks.connection_failed(A, "gone")
    assert registry.models.may_serve("m")
    assert not registry.models.may_serve("n")


async def test_a_model_is_remembered_for_a_while_after_its_instance_has_left_or_unloaded_it() -> None:
    now_s = 100.0
    registry = Registry(
        (spec("a", 1), spec("b", 2)), rules=CheckRules(unhealthy_after=1), model_memory_s=30, clock=lambda: now_s
    )
    registry.checks.succeeded(A, probe({"id": "m"}, {"id": "n"}))
    registry.checks.succeeded(B, probe({"id": "other"}))
    registry.checks.succeeded(A, probe({"id": "m"}))
    assert registry.models.may_serve("n")
    registry.remove(A)
    assert not registry.models.knows("m")
    assert registry.models.may_serve("m")
    now_s = 131.0
    assert [registry.models.may_serve(each) for each in ("m", "n", "other", "never")] == [False, False, True, False]


async def test_without_any_instance_nobody_can_tell_which_models_there_are() -> None:
    assert Registry(rules=CheckRules(unhealthy_after=1)).models.may_serve("m")
