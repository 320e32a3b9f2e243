"""Policies, KV budgets and resets: what all instances are told, and what happens when one does not do it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.fleet import InstanceControl, PolicySwap, SwapBusyError
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import TierStats
from kvcontrol.core.policy_control import PolicyChange
from kvcontrol.core.tenant import tenant_of_salt
from tests.support.admin import ADMIN_KEY, Admin, locked_store
from tests.support.fleet import CHAT, Fleet, chat, instances, running_fleet
from tests.support.running_gateway import eventually, running_gateway
from tests.support.scripted_engine import ScriptedEngine

LRU = {"kind": "eviction", "name": "lru", "params": {}}
S3_FIFO = {"kind": "eviction", "name": "s3fifo", "params": {"small": 0.1}}
SAID = {"name": "s3fifo", "params": {"small": 0.1}}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine(), "plain": ScriptedEngine(kv=False)}
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY, control_timeout_s=3.0) as running:
        yield running


@pytest.fixture
def admin(fleet: Fleet) -> Admin:
    return Admin(fleet.gateway)


def running(fleet: Fleet) -> list[dict[str, Any]]:
    return [fleet.engines[name].policies["eviction"] for name in ("a", "b")]


async def test_a_policy_is_swapped_on_all_instances_and_kept(fleet: Fleet, admin: Admin) -> None:
    said = await admin.ok("PUT", "/policies/eviction", SAID)
    assert {name: each["step"] for name, each in said["instances"].items()} == {"a": "changed", "b": "changed"}
    assert running(fleet) == [S3_FIFO, S3_FIFO]
    listed = await admin.ok("GET", "/policies")
    assert listed["data"][0]["name"] == "s3fifo"
    assert listed["instances"]["b"]["running"] == [S3_FIFO]
    again = await admin.ok("PUT", "/policies/eviction", SAID)
    assert {each["step"] for each in again["instances"].values()} == {"unchanged"}


async def test_a_strategy_of_the_schedule_is_swapped_on_all_instances_or_on_none(fleet: Fleet, admin: Admin) -> None:
    for name in ("a", "b"):
        fleet.engines[name].policies["schedule"] = {"kind": "schedule", "name": "priority", "params": {}}
    said = await admin.ok("PUT", "/policies/schedule", {"name": "hybrid", "params": {"class_s": 5}})
    assert {each["step"] for each in said["instances"].values()} == {"changed"}
    hybrid = {"kind": "schedule", "name": "hybrid", "params": {"class_s": 5}}
    assert [fleet.engines[name].policies["schedule"] for name in ("a", "b")] == [hybrid, hybrid]
    fleet.engines["b"].refused_policies.add("best")
    fleet.engines["a"].strategies = {"hybrid": "all in one sum"}
    assert (await admin.ok("GET", "/policies"))["instances"]["a"]["strategies"] == {"hybrid": "all in one sum"}
    status, _, _ = await admin.call("PUT", "/policies/schedule", {"name": "best", "params": {}})
    assert status == 409
    assert [fleet.engines[name].policies["schedule"] for name in ("a", "b")] == [hybrid, hybrid]


async def test_candidates_are_chosen_and_compared_over_the_fleet(fleet: Fleet, admin: Admin) -> None:
    for name, hits in (("a", 30), ("b", 60)):
        standings = [
            {"policy": policy, "lookups": 100, "hits": found, "hit_ratio": found / 100, "window_hit_ratio": None}
            for policy, found in (("lru", 20), ("mq(lifetime=2)", hits))
        ]
        shadow = {"standings": standings, "window_s": 1.0, "sampled_ratio": 1.0, "requests": 9, "skipped_requests": 0}
        fleet.engines[name].policies["shadow"] = {
            "kind": "shadow",
            "name": "",
            "params": {},
            "shadow": shadow | {"busy_s": 0.1},
        }
    said = await admin.ok("GET", "/policies/shadow")
    assert [(each["policy"], each["hits"]) for each in said["candidates"]] == [("mq(lifetime=2)", 90), ("lru", 40)]
    assert said["instances"]["a"]["in_charge"] == "lru"
    assert said["instances"]["b"]["candidates"][1]["hit_ratio"] == 0.6
    await admin.ok("PUT", "/policies/shadow", {"name": "lru,mq(lifetime=2)"})
    assert fleet.engines["a"].policies["shadow"]["name"] == "lru,mq(lifetime=2)"


async def test_when_one_instance_refuses_the_others_go_back(fleet: Fleet, admin: Admin) -> None:
    fleet.engines["b"].refused_policies.add("s3fifo")
    status, _, said = await admin.call("PUT", "/policies/eviction", SAID)
    assert (status, said["error"]["code"]) == (409, "policy_refused")
    assert "b: s3fifo is not for me" in said["error"]["message"]
    assert "a rolled_back" in said["error"]["message"]
    assert running(fleet) == [LRU, LRU]
    assert fleet.engines["a"].told == ["s3fifo", "lru"]
    assert (await admin.call("GET", "/policies/eviction"))[0] == 404
    [entry] = (await admin.ok("GET", "/audit"))["data"]
    assert (entry["action"], entry["outcome"]) == ("swap", "rolled_back")
    assert entry["detail"]["instances"]["b"]["step"] == "refused"


async def test_an_instance_that_can_not_be_asked_ends_it_before_anything_changed(fleet: Fleet, admin: Admin) -> None:
    fleet.engines["b"].policy_status = 503
    status, _, said = await admin.call("PUT", "/policies/eviction", SAID)
    assert status == 409
    assert "b: scripted" in said["error"]["message"]
    assert fleet.engines["a"].told == fleet.engines["b"].told == []


@pytest.mark.parametrize("fences", [True, False])
async def test_an_engine_that_stops_within_a_change_is_named_and_comes_back_to_what_it_ran(
    tmp_path: Path, *, fences: bool
) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    if not fences:
        for each in engines.values():
            each.fences = None
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY, control_timeout_s=1.0) as fleet:
        admin, (a, b) = Admin(fleet.gateway), engines.values()
        b.freeze()
        async with asyncio.timeout(60):
            status, _, said = await admin.call("PUT", "/policies/eviction", SAID)
        assert (status, said["error"]["code"]) == (409, "policy_refused")
        assert "b: no answer to /kv/v1/policy within 1 s" in said["error"]["message"]
        assert "a rolled_back, b rollback_failed" in said["error"]["message"]
        assert running(fleet) == [LRU, LRU]
        assert a.told == ["s3fifo", "lru"]
        assert (await admin.call("GET", "/policies/eviction"))[0] == 404
        assert b.frozen is not None
        assert [each.name for each in b.frozen] == ["s3fifo", "lru"]

        async def as_before() -> bool:
            return running(fleet) == [LRU, LRU]

        b.thaw()
        assert b.policies["eviction"] == (LRU if fences else S3_FIFO)  # the first call comes last
        await eventually(as_before)
        await admin.ok("PUT", "/policies/eviction", SAID)
        assert running(fleet) == [S3_FIFO, S3_FIFO]


async def test_a_look_at_an_instance_is_one_call_for_all_kinds_of_policies(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.policies |= {kind: {"kind": kind, "name": "lru", "params": {}} for kind in ("eviction:ddr", "eviction:nvme")}
    engine.tiers = {CacheTier.DDR: TierStats(capacity_blocks=9, used_blocks=0, cached_blocks=0, block_bytes=9)}
    async with running_fleet(tmp_path, {"a": engine}, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        for kind in ("eviction", "eviction:ddr"):
            await admin.ok("PUT", f"/policies/{kind}", SAID)
        looks, asked = engine.quotas_asked, engine.policies_asked  # a look asks for the quotas last
        await eventually(lambda: engine.quotas_asked == looks + 1)
        looks, asked = engine.quotas_asked, engine.policies_asked
        await eventually(lambda: engine.quotas_asked == looks + 2)
        assert engine.policies_asked <= asked + 3  # another reader looks once a minute


async def test_an_engine_that_is_stopped_already_ends_a_change_before_anything_changed(tmp_path: Path) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY, control_timeout_s=1.0) as fleet:
        admin, (a, b) = Admin(fleet.gateway), engines.values()
        b.frozen = [PolicyChange(kind="eviction", name="lru")]
        async with asyncio.timeout(60):
            status, _, said = await admin.call("PUT", "/policies/eviction", SAID)
        assert status == 409
        assert "b: no answer to /kv/v1/policy within 1 s" in said["error"]["message"]
        assert a.told == b.told == []


async def test_a_change_waits_for_its_turn_no_longer_than_another_may_take() -> None:
    async with aiohttp.ClientSession() as session:
        swap = PolicySwap(InstanceControl(session, timeout_s=0.02))
        async with swap.exclusive():
            with pytest.raises(SwapBusyError, match="has been running for"):
                async with swap.exclusive():
                    raise AssertionError("two at once")
        async with swap.exclusive():
            pass


async def test_who_keeps_instances_at_the_policy_does_not_bring_back_the_one_before_a_change_that_took_long(
    fleet: Fleet, admin: Admin
) -> None:
    await admin.ok("PUT", "/policies/eviction", SAID)
    gate = asyncio.Event()
    for name in ("a", "b"):
        fleet.engines[name].policy_gate = gate
    change = asyncio.create_task(admin.ok("PUT", "/policies/eviction", {"name": "lru"}))
    await asyncio.sleep(1.5)  # more than a round of who keeps them, which waits for its turn from then on
    gate.set()
    await change
    await admin.ok("PUT", "/quotas/acme", {"kv": {"DDR": {"burst_bytes": 1}}})

    async def a_round_later() -> bool:
        return all(fleet.engines[name].quotas for name in ("a", "b"))

    await eventually(a_round_later)
    assert [fleet.engines[name].told for name in ("a", "b")] == [["s3fifo", "lru"]] * 2


async def test_a_busy_engine_is_asked_again(fleet: Fleet, admin: Admin) -> None:
    fleet.engines["b"].busy_for = 2
    await admin.ok("PUT", "/policies/eviction", SAID)
    assert running(fleet) == [S3_FIFO, S3_FIFO]


async def test_an_unknown_kind_is_refused_and_says_which_there_are(admin: Admin) -> None:
    status, _, said = await admin.call("PUT", "/policies/migration", SAID)
    assert (status, said["error"]["code"]) == (400, "invalid_policy")
    assert "it has eviction" in said["error"]["message"]


@pytest.mark.parametrize("kind", ["eviction", "schedule"])
async def test_a_policy_that_no_instance_knows_is_the_requests_own_mistake(
    fleet: Fleet, admin: Admin, kind: str
) -> None:
    for name in ("a", "b"):
        fleet.engines[name].policies["schedule"] = {"kind": "schedule", "name": "priority", "params": {}}
        fleet.engines[name].refused_policies.add("best")
    status, _, said = await admin.call("PUT", f"/policies/{kind}", {"name": "best", "params": {}})
    assert (status, said["error"]["code"], said["error"]["param"]) == (400, "invalid_policy", "name")
    assert "a: best is not for me" in said["error"]["message"], "in the words of an engine, which name what is allowed"
    assert running(fleet) == [LRU, LRU]


async def test_a_stale_version_changes_no_instance(fleet: Fleet, admin: Admin) -> None:
    await admin.ok("PUT", "/policies/eviction", SAID)
    status, _, _ = await admin.call("PUT", "/policies/eviction", {"name": "lfu"}, if_match='"7"')
    assert status == 412
    assert running(fleet) == [S3_FIFO, S3_FIFO]


async def test_an_instance_that_restarts_is_told_again(tmp_path: Path) -> None:
    first, second = ScriptedEngine(), ScriptedEngine()
    async with first.started(), second.started():
        engines = {"a": first, "b": second}
        async with running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            await gateway.usable(2)
            admin = Admin(gateway)
            await admin.ok("PUT", "/policies/eviction", SAID)
            await admin.ok("PUT", "/quotas/acme", {"kv": {"DDR": {"burst_bytes": 1000}}})
            await eventually(lambda: first.quotas and second.quotas)
    third = ScriptedEngine()
    async with (
        third.started(),
        running_gateway(tmp_path, instances=instances({"c": third}), admin_key=ADMIN_KEY) as gateway,
    ):
        await gateway.usable(1)
        await eventually(lambda: third.policies["eviction"] == S3_FIFO)
        await eventually(lambda: third.quotas == first.quotas)


async def test_a_kv_budget_reaches_the_engines_under_the_name_they_know(fleet: Fleet, admin: Admin) -> None:
    await admin.ok("PUT", "/tenants/acme", {})
    key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
    async with fleet.gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        assert answer.status == 200
    known_as = tenant_of_salt(fleet.last_headers()["x-kvgate-cache-salt"])
    budget = {"guaranteed_bytes": 4096, "burst_bytes": 8192, "weight": 2.0}
    await admin.ok("PUT", "/quotas/acme", {"kv": {"DDR": budget, "NVME": {}}})
    for name in ("a", "b"):
        engine = fleet.engines[name]
        await eventually(lambda engine=engine: len(engine.quotas) == 2)
        assert engine.quotas[known_as, "DDR"] == budget
    await admin.ok("PUT", "/quotas/acme", {"kv": {"NVME": {}}})
    await eventually(lambda: list(fleet.engines["a"].quotas) == [(known_as, "NVME")])
    await admin.ok("DELETE", "/quotas/acme")
    await eventually(lambda: not fleet.engines["a"].quotas)
    assert not fleet.engines["plain"].quotas


async def test_the_default_quotas_budget_is_for_each_tenant_without_its_own(fleet: Fleet, admin: Admin) -> None:
    for name in ("one", "two", "own"):
        await admin.ok("PUT", f"/tenants/{name}", {})
    await admin.ok("PUT", "/quotas/own", {"kv": {"DDR": {"burst_bytes": 5}}})
    await admin.ok("PUT", "/quotas/_default", {"kv": {"DDR": {"burst_bytes": 9}}})
    engine = fleet.engines["a"]
    await eventually(lambda: sorted(each["burst_bytes"] for each in engine.quotas.values()) == [5, 9, 9])


async def test_what_an_instance_refuses_is_shown(admin: Admin) -> None:
    await admin.ok("PUT", "/quotas/acme", {"kv": {"REMOTE": {"burst_bytes": 1}}})

    async def shown() -> bool:
        return (await admin.ok("GET", "/policies"))["instances"]["a"]["problems"] == [
            "KV budget in REMOTE: unknown tier REMOTE"
        ]

    await eventually(shown)
    await admin.ok("DELETE", "/quotas/acme")

    async def gone() -> bool:
        return (await admin.ok("GET", "/policies"))["instances"]["a"]["problems"] == []

    await eventually(gone)


async def test_prefix_caches_are_reset_where_asked(fleet: Fleet, admin: Admin) -> None:
    said = await admin.ok("POST", "/prefix-cache/reset", {"instances": ["b"]})
    assert said == {"instances": {"b": {"dropped": {"HBM": 3, "DDR": 1}, "problem": None}}, "failed": 0}
    said = await admin.ok("POST", "/prefix-cache/reset", {}, idempotency_key="again")
    assert set(said["instances"]) == {"a", "b"}
    assert await admin.ok("POST", "/prefix-cache/reset", {}, idempotency_key="again") == said
    assert [fleet.engines[name].resets for name in ("a", "b")] == [1, 2]
    status, _, said = await admin.call("POST", "/prefix-cache/reset", {"instances": ["plain", "x"]})
    assert status == 400
    assert "plain, x can't be reset" in said["error"]["message"]


async def test_nothing_is_done_unwritten_and_what_was_done_is_answered_and_written_later(
    tmp_path: Path,
) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    settings = {"admin_key": ADMIN_KEY, "store_poll_s": 0.1, "store_timeout_s": 2.0}
    async with running_fleet(tmp_path, engines, **settings) as fleet:
        admin, a = Admin(fleet.gateway), engines["a"]
        with locked_store(tmp_path):
            for method, path, body in (
                ("PUT", "/policies/eviction", SAID),
                ("POST", "/prefix-cache/reset", {}),
            ):
                status, _, said = await admin.call(method, path, body)
                assert (status, said["error"]["code"]) == (503, "store_unavailable")
        assert (a.told, a.resets) == ([], 0)
        a.reset_gate = asyncio.Event()
        asked = asyncio.create_task(
            admin.call("POST", "/prefix-cache/reset", {"instances": ["a"]}, idempotency_key="once")
        )
        await eventually(lambda: a.resets == 1)
        with locked_store(tmp_path):
            a.reset_gate.set()
            status, _, done = await asked
            assert (status, done["failed"]) == (200, 0)
            [entry] = (await admin.ok("GET", "/audit"))["data"]
            assert (entry["action"], entry["outcome"], entry["detail"]) == ("reset", "begun", {"instances": ["a"]})
            again = await admin.call("POST", "/prefix-cache/reset", {"instances": ["a"]}, idempotency_key="once")
            assert (again[0], again[2], a.resets) == (200, done, 1)

        async def written() -> bool:
            [entry] = (await admin.ok("GET", "/audit"))["data"]
            return bool(entry["outcome"] == "done" and entry["detail"] == done)

        await eventually(written)
        again = await admin.call("POST", "/prefix-cache/reset", {"instances": ["a"]}, idempotency_key="once")
        assert (again[1]["idempotency-replayed"], again[2], a.resets) == ("true", done, 1)
