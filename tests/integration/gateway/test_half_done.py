"""Gateways and engines that die in the middle of a change: nothing stays half done, and the audit log says so."""

import asyncio
import copy
import json
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest

from gateway.fleet.undo_note import NotedPin, NotedPolicy, UndoNote
from gateway.state import Action, Kind, Put, open_sqlite
from gateway.state.sqlite import FILE_NAME
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import TierStats
from kvcontrol.core.prefix_control import PinRequest
from tests.integration.gateway.test_process import listening, start
from tests.support.admin import ADMIN_KEY, Admin, operated
from tests.support.endurance import Shaky
from tests.support.fleet import instances
from tests.support.running_gateway import GatewayClient, eventually, running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine

LRU = {"kind": "eviction", "name": "lru", "params": {}}
S3_FIFO = {"kind": "eviction", "name": "s3fifo", "params": {"small": 0.1}}
SAID = {"name": "s3fifo", "params": {"small": 0.1}}
WITHIN_S = 60.0


class HasUrl(Protocol):
    """An engine, or a proxy before one."""

    @property
    def url(self) -> str: ...


class Doomed:
    """A gateway process that is going to be killed."""

    def __init__(self, gateway: GatewayClient, process: asyncio.subprocess.Process) -> None:
        self.gateway = gateway
        self._process = process

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def doomed(state_dir: Path, engines: Mapping[str, HasUrl], **settings: str) -> AsyncIterator[Doomed]:
    process = await start(
        state_dir,
        KVGATE_INSTANCES=json.dumps([{"id": name, "url": each.url} for name, each in engines.items()]),
        KVGATE_ADMIN_KEY=ADMIN_KEY,
        KVGATE_HEALTH_INTERVAL_S="0.05",
        **settings,
    )
    try:
        url = await listening(process)
        assert process.stderr is not None
        drained = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            gateway = GatewayClient(url, session)

            async def up() -> bool:
                try:
                    async with gateway.get("/readyz") as answer:
                        return bool((await answer.json())["usable"] == len(engines))
                except aiohttp.ClientError:
                    return False

            await eventually(up, WITHIN_S)
            yield Doomed(gateway, process)
        await drained
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def audited(admin: Admin) -> list[tuple[str, str, Any]]:
    return [(each["action"], each["outcome"], each["detail"]) for each in (await admin.ok("GET", "/audit"))["data"]]


async def lost(call: Any) -> None:
    """Wait for a call whose gateway dies."""
    try:
        await call
    except aiohttp.ClientError:
        return
    raise AssertionError("it was answered")


async def test_a_swap_whose_gateway_is_killed_in_the_middle_is_undone_by_another_one(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    async with a.started(), b.started():
        engines = {"a": a, "b": b}
        async with doomed(tmp_path, engines) as first:
            b.policy_gate = asyncio.Event()
            change = asyncio.create_task(lost(Admin(first.gateway).call("PUT", "/policies/eviction", SAID)))
            await eventually(lambda: a.policies["eviction"] == S3_FIFO)
            await first.kill()
            await change
        async with running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)
            await gateway.usable(2)

            async def named() -> bool:
                return [each["kind"] for each in (await admin.ok("GET", "/status"))["problems"]] == ["operation"]

            await eventually(named, WITHIN_S)
            assert (await audited(admin))[0][1] == "begun"
            b.policy_gate.set()  # it does at last what it was told

            async def undone() -> bool:
                return (await audited(admin))[0][1] == "undone"

            await eventually(undone, WITHIN_S)
            assert [a.policies["eviction"], b.policies["eviction"]] == [LRU, LRU]
            [(action, _, detail)] = await audited(admin)
            assert (action, detail["interrupted"]) == ("swap", "the gateway that began it has ended")
            assert (await admin.call("GET", "/policies/eviction"))[0] == 404
            assert (await admin.ok("GET", "/status"))["problems"] == []


async def test_a_swap_over_a_stored_policy_ends_at_what_is_stored(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    async with a.started(), b.started():
        engines = {"a": a, "b": b}
        async with (
            running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway,
            doomed(tmp_path, engines) as first,
        ):
            await gateway.usable(2)
            admin = Admin(gateway)
            await admin.ok("PUT", "/policies/eviction", SAID)
            b.policy_gate = asyncio.Event()
            other = {"name": "fifo"}
            change = asyncio.create_task(lost(Admin(first.gateway).call("PUT", "/policies/eviction", other)))
            await eventually(lambda: a.policies["eviction"]["name"] == "fifo")
            await first.kill()
            await change
            b.policy_gate.set()

            async def undone() -> bool:
                return [outcome for _, outcome, _ in await audited(admin)] == ["undone", "done"]

            await eventually(undone, WITHIN_S)
            assert [a.policies["eviction"], b.policies["eviction"]] == [S3_FIFO, S3_FIFO]


async def test_an_instance_whose_policy_another_sender_changed_runs_the_stored_one_again(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with operated(tmp_path, engine) as (_, admin):
        await admin.ok("PUT", "/policies/eviction", SAID)
        engine.policies["eviction"] = {"kind": "eviction", "name": "fifo", "params": {}}
        await eventually(lambda: engine.policies["eviction"] == S3_FIFO, WITHIN_S)


async def test_a_stored_policy_that_an_instance_refuses_is_a_problem_until_it_is_accepted(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    b.refused_policies.add("s3fifo")
    store = open_sqlite(tmp_path)
    stored = Put(kind=Kind.POLICY, name="eviction", body=json.dumps(SAID))
    await store.apply([stored], action=Action(actor="t", action="put", target="t"))
    await store.close()
    async with (
        a.started(),
        b.started(),
        running_gateway(tmp_path, instances=instances({"a": a, "b": b}), admin_key=ADMIN_KEY) as gateway,
    ):
        await gateway.counted('kvgate_problems{kind="policy"}', 1)
        [problem] = (await Admin(gateway).ok("GET", "/status"))["problems"]
        assert (problem["kind"], problem["subject"]) == ("policy", "stored policy eviction of instance b")
        assert "policy 's3fifo' of kind eviction: s3fifo is not for me" in problem["message"]
        await eventually(lambda: a.policies["eviction"] == S3_FIFO, WITHIN_S)
        await Admin(gateway).ok("PUT", "/policies/eviction", {"name": "fifo"})
        await gateway.counted('kvgate_problems{kind="policy"}', 0)


async def test_a_store_without_its_fence_refuses_swaps_and_is_a_problem_until_the_fence_is_back(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with operated(tmp_path, engine) as (gateway, admin):
        await admin.ok("PUT", "/policies/eviction", SAID)
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as store:
            [(_, name, _)] = store.execute("SELECT only_row, store, number FROM kvgate_fence").fetchall()
            store.execute("DELETE FROM kvgate_fence")
            engine.policies["eviction"] = {"kind": "eviction", "name": "fifo", "params": {}}
            await gateway.counted('kvgate_problems{kind="store"}', 1)
            [problem] = (await admin.ok("GET", "/status"))["problems"]
            assert "kvgate_fence is empty: restore the backup" in problem["message"]
            status, _, said = await admin.call("PUT", "/policies/eviction", {"name": "lru"})
            assert (status, said["error"]["code"]) == (503, "store_unavailable")
            store.execute("INSERT INTO kvgate_fence (only_row, store, number) VALUES (1, ?, 0)", [name])
        await eventually(lambda: engine.policies["eviction"] == S3_FIFO, WITHIN_S)
        await gateway.counted('kvgate_problems{kind="store"}', 0)
        await admin.ok("PUT", "/policies/eviction", {"name": "lru"})
        assert engine.policies["eviction"] == LRU


async def test_kv_budgets_that_another_sender_changed_are_the_stored_ones_again(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    left = {"guaranteed_bytes": 1, "burst_bytes": None, "weight": 1.0}
    engine.quotas = {("ab" * 8, "DDR"): left, ("shared", "DDR"): left}  # nobody tells that it is no longer wanted
    engine.tiers = {CacheTier.DDR: TierStats(capacity_blocks=9, used_blocks=0, cached_blocks=0, block_bytes=9)}
    async with operated(tmp_path, engine) as (_, admin):
        await eventually(lambda: engine.quotas == {("shared", "DDR"): left}, WITHIN_S)
        await admin.ok("PUT", "/quotas/acme", {"kv": {"DDR": {"burst_bytes": 10}, "NVME": {"weight": 2}}})
        await eventually(lambda: len(engine.quotas) == 3, WITHIN_S)
        stored = copy.deepcopy(engine.quotas)
        first, second, third = engine.quotas
        engine.quotas[second]["weight"] = 7.0
        del engine.quotas[third]
        engine.quotas["cd" * 8, "NVME"] = left
        await eventually(lambda: engine.quotas == stored, WITHIN_S)
        assert first == ("shared", "DDR")


async def test_a_kv_budget_that_an_instance_rounds_is_sent_once(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    engine.quota_unit_bytes = 4096
    async with operated(tmp_path, engine) as (_, admin):
        await admin.ok("PUT", "/quotas/acme", {"kv": {"DDR": {"burst_bytes": 5000}}})
        await eventually(lambda: [each["burst_bytes"] for each in engine.quotas.values()] == [4096], WITHIN_S)
        asked = engine.quotas_asked
        await eventually(lambda: engine.quotas_asked > asked + 1, WITHIN_S)
        assert engine.quotas_told == 1


async def test_a_gateway_that_can_not_read_all_documents_takes_no_kv_budget_back(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    left = {"guaranteed_bytes": 1, "burst_bytes": None, "weight": 1.0}
    store = open_sqlite(tmp_path)
    newer = Put(kind=Kind.QUOTA, name="acme", body='{"kv": {"DDR": {"burst_bytes": "most"}}}', expected=None)
    mine = Put(kind=Kind.QUOTA, name="own", body='{"kv": {"NVME": {"burst_bytes": 5}}}', expected=None)
    await store.apply([newer, mine], action=Action(actor="admin", action="put", target="t", outcome="done"))
    await store.close()
    async with operated(tmp_path, engine):
        await eventually(lambda: [each["burst_bytes"] for each in engine.quotas.values()] == [5], WITHIN_S)
        [own] = engine.quotas
        engine.quotas = {("ab" * 8, "DDR"): left}
        await eventually(lambda: own in engine.quotas, WITHIN_S)
        assert engine.quotas["ab" * 8, "DDR"] == left


async def test_a_pin_that_another_sender_removed_is_sent_again(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with operated(tmp_path, engine) as (_, admin):
        await admin.ok("POST", "/prefixes", {"model": MODEL, "prompt": list(range(64))})
        [name] = engine.pins
        engine.pins.clear()
        await eventually(lambda: list(engine.pins) == [name], WITHIN_S)


async def test_an_engine_that_dies_in_the_middle_of_a_swap_takes_it_back_from_the_others(tmp_path: Path) -> None:
    a, mortal = ScriptedEngine(), Shaky()
    async with a.started():
        await mortal.start()
        b = mortal.engine
        async with running_gateway(
            tmp_path, instances=instances({"a": a, "b": b}), admin_key=ADMIN_KEY, control_timeout_s=5.0
        ) as gateway:
            await gateway.usable(2)
            admin = Admin(gateway)
            b.policy_gate = asyncio.Event()
            change = asyncio.create_task(admin.call("PUT", "/policies/eviction", SAID))
            await eventually(lambda: a.policies["eviction"] == S3_FIFO)
            dying = asyncio.create_task(mortal.stop())
            status, _, said = await change
            b.policy_gate.set()
            await dying
            assert (status, said["error"]["code"]) == (409, "policy_refused")
            assert a.policies["eviction"] == LRU
            assert (await admin.call("GET", "/policies/eviction"))[0] == 404
            b.policies["eviction"] = LRU  # it comes back as a new process does
            await mortal.start()
            await gateway.usable(2)
            await admin.ok("PUT", "/policies/eviction", SAID)
            assert [a.policies["eviction"], b.policies["eviction"]] == [S3_FIFO, S3_FIFO]
        await mortal.stop()


async def test_a_preset_and_a_pin_that_were_left_half_done_are_undone(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    store = open_sqlite(tmp_path)

    def noted(kind: str, name: str) -> NotedPolicy:
        return NotedPolicy(instance="a", kind=kind, name=name)

    for action, note in (
        ("apply", UndoNote(policies=[noted("eviction:ddr", "lru"), noted("eviction:nvme", "mq")])),
        ("pin", UndoNote(pins=[NotedPin("a", "ab" * 16)])),
    ):
        number = await store.begin(Action(actor="admin", action=action, target="t", outcome="begun"), lease_s=0)
        await store.note(number, note.text(), lease_s=0)
    await store.close()
    async with engine.started():
        for kind in ("eviction:ddr", "eviction:nvme"):
            engine.policies[kind] = {"kind": kind, "name": "fifo", "params": {}}
        engine.pins["ab" * 16] = PinRequest(hashes=["ab" * 16], ttl_s=900)
        async with running_gateway(tmp_path, instances=instances({"a": engine}), admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)

            async def undone() -> bool:
                return [outcome for _, outcome, _ in await audited(admin)] == ["undone", "undone"]

            await eventually(undone, WITHIN_S)
            names = [engine.policies[kind]["name"] for kind in ("eviction:ddr", "eviction:nvme")]
            assert (names, engine.pins) == (["lru", "mq"], {})


@pytest.mark.parametrize("detail", ["not JSON", "[1]", "[" * 1100 + "]" * 1100, ""])
async def test_an_operation_whose_detail_can_not_be_read_ends_and_is_listed(tmp_path: Path, detail: str) -> None:
    store = open_sqlite(tmp_path)
    await store.begin(Action(actor="admin", action="pin", target="t", outcome="begun", detail=detail), lease_s=0)
    await store.close()
    async with ScriptedEngine().started() as engine:
        named = instances({"a": engine})
        async with running_gateway(tmp_path, instances=named, admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)

            async def ended() -> bool:
                return [outcome for _, outcome, _ in await audited(admin)] == ["interrupted"]

            await eventually(ended, WITHIN_S)
            [(_, _, shown)] = await audited(admin)
            assert shown["unreadable"] == detail[:200]


async def test_an_operation_with_nothing_to_undo_ends_too(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with engine.started():
        engines = {"a": engine}
        async with doomed(tmp_path, engines) as first:
            engine.reset_gate = asyncio.Event()
            change = asyncio.create_task(lost(Admin(first.gateway).call("POST", "/prefix-cache/reset", {})))
            await eventually(lambda: engine.resets == 1)
            await first.kill()
            await change
            engine.reset_gate.set()
        async with running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)

            async def ended() -> bool:
                return [(action, outcome) for action, outcome, _ in await audited(admin)] == [("reset", "interrupted")]

            await eventually(ended, WITHIN_S)


async def test_a_preset_whose_gateway_is_killed_while_it_is_applied_is_undone_by_another_one(tmp_path: Path) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    ddr = {"kind": "eviction:ddr", "name": "fifo", "params": {}}
    for engine in engines.values():
        engine.policies["eviction:ddr"] = ddr
        engine.tiers = {CacheTier.DDR: TierStats(capacity_blocks=9, used_blocks=0, cached_blocks=0, block_bytes=9)}
    a, b = engines.values()
    preset = {"name": "long-context-32k", "hardware": "cpu"}
    async with a.started(), b.started():
        async with doomed(tmp_path, engines) as first:
            b.policy_gate = asyncio.Event()
            change = asyncio.create_task(lost(Admin(first.gateway).call("PUT", "/presets/current", preset)))
            await eventually(lambda: a.policies["eviction:ddr"] != ddr)
            await first.kill()
            await change
        async with running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            await gateway.usable(2)
            b.policy_gate.set()
            admin = Admin(gateway)

            async def undone() -> bool:
                return (await audited(admin))[0][:2] == ("apply", "undone")

            await eventually(undone, WITHIN_S)
            assert [each.policies["eviction:ddr"] for each in (a, b)] == [ddr, ddr]
            assert (await admin.call("GET", "/presets/current"))[0] == 404
            assert (a.quotas, b.quotas) == ({}, {})


async def test_a_pin_whose_gateway_is_killed_before_all_instances_keep_it_is_taken_back_by_another_one(
    tmp_path: Path,
) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    a, b = engines.values()
    async with a.started(), b.started():
        async with doomed(tmp_path, engines) as first:
            b.pins_hang = True
            body = {"model": MODEL, "prompt": list(range(64)), "instances": ["a", "b"]}
            change = asyncio.create_task(lost(Admin(first.gateway).call("POST", "/prefixes", body)))
            await eventually(lambda: a.pins and b.pins_told)
            await first.kill()
            await change
            b.pins_hang = False
        async with running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)

            async def undone() -> bool:
                return (await audited(admin))[0][:2] == ("pin", "undone")

            await eventually(undone, WITHIN_S)
            assert (a.pins, b.pins) == ({}, {})
            assert (await admin.ok("GET", "/prefixes"))["data"] == []
