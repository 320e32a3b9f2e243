"""``/admin/v1/prefixes`` against scripted engines: who is told what, what is kept of it, and for how long."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvcontrol.core import chain_hashes, root_hash, token_bytes
from kvcontrol.core.control import CACHE_SALT_HEADER
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import COMPLETIONS, Fleet, instances, running_fleet
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import IDENTITY, MODEL, ScriptedEngine

PROMPT = list(range(200))
"""12 blocks that can be found again, and a bit."""
BODY = {"model": MODEL, "prompt": PROMPT}


async def home_of(fleet: Fleet) -> str:
    """Have the prompt answered, and return by whom, once the gateway knows its blocks."""
    async with fleet.gateway.post(COMPLETIONS, BODY) as answer:
        assert answer.status == 200, await answer.text()
        home = str(answer.headers["x-kvgate-instance"])
    await fleet.gateway.counted(f'kvgate_resident_blocks{{instance="{home}",tier="HBM"}}', 12)
    return home


def names(engine: ScriptedEngine) -> list[int]:
    return [len(each.hashes) for each in engine.pins.values()]


async def outcomes(admin: Admin, pin: str) -> dict[str, str]:
    data = {each["id"]: each for each in (await admin.ok("GET", "/prefixes"))["data"]}
    return {name: each["outcome"] for name, each in data[pin]["instances"].items()}


async def test_a_prompt_is_pinned_where_it_is_held_listed_and_unpinned(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        home = await home_of(fleet)
        engine = fleet.engines[home]
        pin = await admin.ok("POST", "/prefixes", {**BODY, "ttl_s": 3600, "note": "system prompt"})
        assert (pin["tokens"], pin["version"], pin["failed"], pin["tenant"]) == (200, 1, 0, "anonymous")
        assert 3590 < pin["left_s"] <= 3600
        assert pin["instances"] == {
            home: {"outcome": "pinned", "reason": "", "tiers": {"HBM": 12}, "missing_blocks": 0}
        }
        assert names(engine) == [12]
        salt = engine.headers[-1][CACHE_SALT_HEADER]
        path = chain_hashes(root_hash(IDENTITY, salt=salt), token_bytes(PROMPT), 16)
        assert [each.hashes for each in engine.pins.values()] == [[each.hex() for each in path]]
        again = await admin.ok("POST", "/prefixes", BODY)
        assert (again["id"], again["version"], again["left_s"]) == (pin["id"], 2, None)
        shown = await admin.ok("GET", "/prefixes")
        assert [each["id"] for each in shown["data"]] == [pin["id"]]
        assert shown["instances"][home] == {
            "pinned_blocks": 12,
            "limit_blocks": 1000,
            "limited_by": "the script",
            "problem": None,
        }
        status, _, said = await admin.call("DELETE", f"/prefixes/{pin['id']}", if_match='"1"')
        assert (status, engine.pins != {}) == (412, True), said
        gone = await admin.ok("DELETE", f"/prefixes/{pin['id']}")
        assert gone["instances"][home]["outcome"] == "unpinned"
        assert engine.pins == {}
        status, _, said = await admin.call("DELETE", f"/prefixes/{pin['id']}")
        assert (status, said["error"]["code"]) == (404, "pin_not_found")
        audit = await admin.ok("GET", "/audit")
        assert [each["action"] for each in audit["data"]] == ["unpin", "pin", "pin"]
        assert json.dumps(PROMPT)[:20] not in json.dumps(audit)


async def test_a_hash_stands_for_all_that_comes_before_it_and_needs_no_prompt(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        home = await home_of(fleet)
        cache = fleet.engines[home].cache
        assert cache is not None
        path = [each.hex() for each in cache.resident]
        pin = await admin.ok("POST", "/prefixes", {"model": MODEL, "hash": path[4]})
        assert list(pin["instances"]) == [home]
        assert [each.hashes for each in fleet.engines[home].pins.values()] == [path[:5]]
        status, _, said = await admin.call("POST", "/prefixes", {"model": MODEL, "hash": "00" * 16})
        assert (status, said["error"]["code"]) == (404, "block_not_found")


async def test_tenants_prefixes_are_different_ones(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        pins = [
            await admin.ok("POST", "/prefixes", {**BODY, "tenant": tenant, "instances": ["a"]})
            for tenant in ("acme", "other")
        ]
        assert len({each["id"] for each in pins}) == len(fleet.engines["a"].pins) == 2
        unsalted = chain_hashes(root_hash(IDENTITY), token_bytes(PROMPT), 16)
        assert unsalted[11].hex() not in fleet.engines["a"].pins
        await admin.ok("PUT", "/tenants/acme", {})
        await admin.ok("DELETE", "/tenants/acme")
        await eventually(lambda: _is(lambda: len(fleet.engines["a"].pins) == 1))
        assert [each["tenant"] for each in (await admin.ok("GET", "/prefixes"))["data"]] == ["other"]


async def test_who_refuses_and_who_knows_no_prefixes_is_named_beside_who_pinned(tmp_path: Path) -> None:
    engines = {name: ScriptedEngine() for name in ("full", "good", "old")} | {"plain": ScriptedEngine(kv=False)}
    engines["full"].most_pinned_blocks = 3
    engines["old"].knows_prefixes = False
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        pin = await admin.ok("POST", "/prefixes", {**BODY, "instances": list(engines)})
        said = {name: (each["outcome"], each["reason"]) for name, each in pin["instances"].items()}
        assert said == {
            "full": ("refused", "at most 3 may be"),
            "good": ("pinned", ""),
            "old": ("skipped", "it has no /kv/v1/prefixes"),
            "plain": ("skipped", "it has no /kv/v1"),
        }
        assert pin["failed"] == 1
        assert await outcomes(admin, pin["id"]) == {"good": "pinned"}
        audit = (await admin.ok("GET", "/audit"))["data"][0]
        assert (audit["outcome"], audit["detail"]["instances"]["full"]) == ("partly", "refused")
        status, _, said = await admin.call("POST", "/prefixes", {**BODY, "instances": ["full"], "tenant": "t"})
        assert (status, said["error"]["code"]) == (409, "pin_refused")
        assert "full: at most 3 may be" in said["error"]["message"]
        assert len((await admin.ok("GET", "/prefixes"))["data"]) == 1


async def test_a_pin_survives_restarts_of_the_engine_and_of_the_gateway(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        await first.enter_async_context(engine.started())
        port = engine.port
        settings: dict[str, Any] = {"instances": instances({"a": engine}), "admin_key": ADMIN_KEY}
        async with running_gateway(tmp_path, **settings) as gateway:
            await gateway.usable(1)
            pin = await Admin(gateway).ok("POST", "/prefixes", BODY)
            await first.aclose()
            engine.pins.clear()
            await stack.enter_async_context(engine.started(port))
            await eventually(lambda: _is(lambda: names(engine) == [12]))
            await eventually(lambda: _pinned(gateway, pin["id"]))
        engine.pins.clear()
        async with running_gateway(tmp_path, **settings) as gateway:
            await gateway.usable(1)
            await eventually(lambda: _is(lambda: names(engine) == [12]))
            [shown] = (await Admin(gateway).ok("GET", "/prefixes"))["data"]
            assert shown["id"] == pin["id"]
            lease = next(iter(engine.pins.values())).ttl_s
            assert lease is not None
            assert lease <= 900


async def test_an_instance_that_says_nothing_to_one_pin_is_not_told_the_others_and_holds_up_nobody(
    tmp_path: Path,
) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        await first.enter_async_context(a.started())
        port = a.port
        await stack.enter_async_context(b.started())
        settings: dict[str, Any] = {"instances": instances({"a": a, "b": b}), "admin_key": ADMIN_KEY}
        async with running_gateway(tmp_path, **settings, control_timeout_s=1.0) as gateway:
            await gateway.usable(2)
            admin = Admin(gateway)
            for tenant in ("t1", "t2", "t3"):
                await admin.ok("POST", "/prefixes", {**BODY, "tenant": tenant, "instances": ["a"]})
            await first.aclose()
            a.pins.clear()
            a.pins_hang, told = True, a.pins_told
            await stack.enter_async_context(a.started(port))
            await eventually(lambda: _is(lambda: a.pins_told > told))
            for tenant in ("t4", "t5"):
                await admin.ok("POST", "/prefixes", {**BODY, "tenant": tenant, "instances": ["b"]})
            assert len(b.pins) == 2
            assert a.pins_told == told + 1


async def test_a_pin_ends_when_its_time_is_over(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("POST", "/prefixes", {**BODY, "ttl_s": 0.05, "instances": ["a"]})
        await eventually(lambda: _is(lambda: fleet.engines["a"].pins == {}))
        assert (await admin.ok("GET", "/prefixes"))["data"] == []
        assert (await admin.ok("GET", "/audit"))["data"][0]["action"] == "expire"


async def test_an_unpinned_prefix_that_another_pin_has_is_kept(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        home = await home_of(fleet)
        by_prompt = await admin.ok("POST", "/prefixes", BODY)
        cache = fleet.engines[home].cache
        assert cache is not None
        by_hash = await admin.ok("POST", "/prefixes", {"model": MODEL, "hash": list(cache.resident)[-1].hex()})
        assert by_hash["id"] != by_prompt["id"]
        gone = await admin.ok("DELETE", f"/prefixes/{by_prompt['id']}")
        assert gone["instances"][home]["outcome"] == "kept"
        assert names(fleet.engines[home]) == [12]
        assert (await admin.ok("DELETE", f"/prefixes/{by_hash['id']}"))["instances"][home]["outcome"] == "unpinned"
        assert names(fleet.engines[home]) == []


async def test_an_invalidated_prefix_is_forgotten_everywhere_with_its_pins(tmp_path: Path) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine(), "plain": ScriptedEngine(kv=False)}
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        for name in ("a", "b"):
            cache = engines[name].cache
            assert cache is not None
            await cache.store(PROMPT, "")
            await fleet.gateway.counted(f'kvgate_resident_blocks{{instance="{name}",tier="HBM"}}', 12)
        salted = {**BODY, "tenant": "t"}
        nothing = await admin.ok("POST", "/prefixes/invalidate", salted)
        assert [each["dropped"] for each in nothing["instances"].values() if each["dropped"]] == [{"HBM": 0}] * 2
        assert nothing["instances"]["plain"]["outcome"] == "skipped"
        path = [each.hex() for each in chain_hashes(root_hash(IDENTITY), token_bytes(PROMPT), 16)]
        first, last = path[0], path[-1]
        pin = await admin.ok("POST", "/prefixes", {"model": MODEL, "hash": last})
        assert sorted(pin["instances"]) == ["a", "b"]
        only_a = await admin.ok("POST", "/prefixes/invalidate", {"model": MODEL, "hash": last, "instances": ["a"]})
        assert only_a["instances"] == {
            "a": {"outcome": "invalidated", "reason": "", "dropped": {"HBM": 1}, "in_use_blocks": 0}
        }
        assert only_a["unpinned"] == [pin["id"]]
        assert await outcomes(admin, pin["id"]) == {"b": "pinned"}
        every = await admin.ok("POST", "/prefixes/invalidate", {"model": MODEL, "hash": first})
        assert {name: each["dropped"] for name, each in every["instances"].items()} == {
            "a": {"HBM": 11},
            "b": {"HBM": 12},
            "plain": {},
        }
        assert (every["unpinned"], every["failed"]) == ([pin["id"]], 0)
        assert (await admin.ok("GET", "/prefixes"))["data"] == []
        assert engines["b"].pins == {}
        for name in ("a", "b"):
            await fleet.gateway.counted(f'kvgate_resident_blocks{{instance="{name}",tier="HBM"}}', 0)


async def test_what_is_wrong_is_named_and_only_the_admin_key_opens(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        for body, status, why in (
            ({"model": MODEL}, 400, "give one of prompt, messages and hash"),
            ({**BODY, "hash": "00" * 16}, 400, "give one of"),
            ({"model": MODEL, "hash": "0"}, 400, "hash"),
            ({**BODY, "model": "none"}, 404, "does not exist"),
            ({"model": MODEL, "prompt": "text"}, 400, "no_tokenizer"),
            ({"model": MODEL, "prompt": [1, 2, 3]}, 400, "3 tokens fill no block"),
            ({**BODY, "instances": ["nobody"]}, 400, "unknown instance nobody; known: a, b"),
            ({**BODY, "ttl_s": 0}, 400, "ttl_s"),
        ):
            found, _, said = await admin.call("POST", "/prefixes", body)
            assert (found, why in said["error"]["message"]) == (status, True), said
        assert (await Admin(fleet.gateway, "something else entirely").call("GET", "/prefixes"))[0] == 401
        status, headers, _ = await admin.call("POST", "/prefixes", {**BODY, "instances": ["a"]}, idempotency_key="k")
        assert (status, "idempotency-replayed" in headers) == (200, False)
        status, headers, _ = await admin.call("POST", "/prefixes", {**BODY, "instances": ["a"]}, idempotency_key="k")
        assert (status, headers["idempotency-replayed"], fleet.engines["a"].pins_told) == (200, "true", 1)


async def _is(condition: Any) -> bool:
    return bool(condition())


async def _pinned(gateway: RunningGateway, pin: str) -> bool:
    return await outcomes(Admin(gateway), pin) == {"a": "pinned"}
