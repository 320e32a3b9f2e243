"""Changes of policies over several gateways of a store: whatever comes between, the fleet ends at one policy."""

import asyncio
import json
import signal
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pytest

from gateway.api.admin.operations import Operations
from gateway.fleet import Policy
from gateway.fleet.undo_note import NotedPolicy, UndoNote
from gateway.state import Action, Kind, Put, open_sqlite
from gateway.state.sqlite import FILE_NAME
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.policy_control import MOST_FENCE, Fence
from tests.integration.gateway.test_half_done import LRU, S3_FIFO, SAID, WITHIN_S, audited, doomed, lost
from tests.integration.gateway.test_process import listening, start
from tests.support.admin import ADMIN_KEY, Admin, operated
from tests.support.cutting_proxy import cutting_proxy
from tests.support.databases import Server, postgres_server, postgres_url
from tests.support.fleet import instances
from tests.support.late_proxy import LateProxy, late_proxy
from tests.support.running_gateway import GatewayClient, RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import ScriptedEngine

SECRET = "the same secret everywhere"  # noqa: S105 - of no one


async def outcomes(admin: Admin) -> list[tuple[str, str]]:
    return [(action, outcome) for action, outcome, _ in await audited(admin)]


async def problems(admin: Admin) -> list[Any]:
    return [each["kind"] for each in (await admin.ok("GET", "/status"))["problems"]]


async def test_a_gateway_refuses_a_swap_while_another_one_makes_one(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    engines = {"a": a, "b": b}
    async with (
        a.started(),
        b.started(),
        running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as one,
        running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as two,
    ):
        await one.usable(2)
        await two.usable(2)
        first, second = Admin(one), Admin(two)
        b.refused_policies = {"fifo", "s3fifo"}
        b.policy_gate = asyncio.Event()
        change = asyncio.create_task(first.call("PUT", "/policies/eviction", {"name": "fifo"}))
        await eventually(lambda: a.policies["eviction"]["name"] == "fifo")
        for path, body in (
            ("/policies/eviction", SAID),
            ("/presets/current", {"name": "long-context-32k", "hardware": "cpu"}),
        ):
            status, headers, said = await second.call("PUT", path, body)
            assert (status, said["error"]["code"]) == (409, "policy_change_under_way")
            assert "swap policies/eviction by admin@127.0.0.1 has not ended" in said["error"]["message"]
            assert headers["retry-after"] == "2"
        b.policy_gate.set()
        status, _, said = await change
        assert (status, said["error"]["code"]) == (409, "policy_refused")
        assert [each.policies["eviction"] for each in engines.values()] == [LRU, LRU]
        assert await outcomes(second) == [("swap", "rolled_back")]
        b.refused_policies = set()
        await second.ok("PUT", "/policies/eviction", SAID)
        assert [each.policies["eviction"] for each in engines.values()] == [S3_FIFO, S3_FIFO]


async def test_a_gateway_that_stood_still_after_its_note_changes_no_instance(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    engines = {"a": a, "b": b}
    with postgres_server() as server, cutting_proxy(server.port) as proxy:
        async with (
            a.started(),
            b.started(),
            running_gateway(
                tmp_path / "other",
                instances=instances(engines),
                admin_key=ADMIN_KEY,
                salt_secret=SECRET,
                store_url=postgres_url(server),
            ) as other,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        ):
            process = await start(
                tmp_path / "stopped",
                KVGATE_INSTANCES=json.dumps(instances(engines)),
                KVGATE_ADMIN_KEY=ADMIN_KEY,
                KVGATE_HEALTH_INTERVAL_S="0.05",
                KVGATE_SALT_SECRET=SECRET,
                KVGATE_STORE_URL=f"postgresql://kvgate@127.0.0.1:{proxy.port}/postgres",
                KVGATE_STORE_TIMEOUT_S="60",
            )
            assert process.stderr is not None
            try:
                stopped = GatewayClient(await listening(process), session)
                drained = asyncio.create_task(process.stderr.read())
                await stopped.usable(2)
                await other.usable(2)
                proxy.hold_at(b"UPDATE kvgate_acts SET note", b"COMMIT")
                change = asyncio.create_task(Admin(stopped).call("PUT", "/policies/eviction", SAID))
                await eventually(lambda: proxy.holding, WITHIN_S)
                process.send_signal(signal.SIGSTOP)
                proxy.let_go()
                admin = Admin(other)

                async def undone() -> bool:
                    return await outcomes(admin) == [("swap", "undone")]

                await eventually(undone, WITHIN_S)
                process.send_signal(signal.SIGCONT)
                status, _, said = await change
                assert (status, said["error"]["code"]) == (409, "operation_lost")
                assert {*a.told, *b.told} == {"lru"}  # of the gateway that has undone it
                assert await outcomes(admin) == [("swap", "undone")]
            finally:
                process.kill()
                await process.wait()
            await drained


@pytest.mark.parametrize("fences", [True, False])
async def test_another_gateway_completes_a_rollback_that_an_instance_did_not_answer(
    tmp_path: Path, *, fences: bool
) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    if not fences:
        a.fences = b.fences = None
    engines = {"a": a, "b": b}
    async with a.started(), b.started():
        async with doomed(tmp_path, engines, KVGATE_CONTROL_TIMEOUT_S="1") as first:
            b.freeze()
            status, _, said = await Admin(first.gateway).call("PUT", "/policies/eviction", SAID)
            assert (status, said["error"]["code"]) == (409, "policy_refused")
            assert "b rollback_failed" in said["error"]["message"]
            await first.kill()
        async with running_gateway(
            tmp_path, instances=instances(engines), admin_key=ADMIN_KEY, control_timeout_s=1.0
        ) as gateway:
            admin = Admin(gateway)

            async def named() -> bool:
                return await problems(admin) == ["operation"]

            await eventually(named, WITHIN_S)
            assert await outcomes(admin) == [("swap", "rolled_back")]
            b.thaw()
            assert b.policies["eviction"] == (LRU if fences else S3_FIFO)  # the first call comes last

            async def restored() -> bool:
                return await problems(admin) == [] and b.policies["eviction"] == LRU

            await eventually(restored, WITHIN_S)
            assert await outcomes(admin) == [("swap", "rolled_back")]


async def outcome_is(admin: Admin, outcome: str) -> None:
    async def there() -> bool:
        return (await outcomes(admin))[0] == ("swap", outcome)

    await eventually(there, WITHIN_S)


async def swap_and_kill(
    folder: Path, ways: Mapping[str, ScriptedEngine | LateProxy], late: Sequence[LateProxy], **settings: str
) -> None:
    """Begin a swap to S3-FIFO, and kill its gateway once all its calls to ``late`` are on their way."""
    async with doomed(folder, ways, **settings) as first:
        change = asyncio.create_task(lost(Admin(first.gateway).call("PUT", "/policies/eviction", SAID)))
        await eventually(lambda: all(each.requests for each in late))
        await first.kill()
        await change


async def test_calls_of_a_gateway_that_was_killed_before_any_arrived_change_nothing_later(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    async with a.started(), b.started(), late_proxy(a.port) as to_a, late_proxy(b.port) as to_b:
        await swap_and_kill(tmp_path, {"a": to_a, "b": to_b}, [to_a, to_b])
        assert [a.policies["eviction"], b.policies["eviction"]] == [LRU, LRU]
        async with running_gateway(tmp_path, instances=instances({"a": a, "b": b}), admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)
            await outcome_is(admin, "undone")
            assert [await to_a.deliver(), await to_b.deliver()] == [[409], [409]]
            assert [a.policies["eviction"], b.policies["eviction"]] == [LRU, LRU]
            assert await problems(admin) == []


async def test_a_late_call_of_a_killed_gateway_does_not_undo_a_newer_swap(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    async with a.started(), b.started(), late_proxy(b.port) as to_b:
        await swap_and_kill(tmp_path, {"a": a, "b": to_b}, [to_b])
        async with running_gateway(tmp_path, instances=instances({"a": a, "b": b}), admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)
            await outcome_is(admin, "undone")
            await admin.ok("PUT", "/policies/eviction", {"name": "fifo"})
            assert await to_b.deliver() == [409]
            assert [a.policies["eviction"]["name"], b.policies["eviction"]["name"]] == ["fifo", "fifo"]


async def test_a_late_call_of_a_keeper_does_not_undo_a_newer_swap_to_the_policy_that_runs(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    engines = {"a": a, "b": b}
    async with a.started(), b.started(), late_proxy(b.port) as to_b:
        async with running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            await gateway.usable(2)
            await Admin(gateway).ok("PUT", "/policies/eviction", SAID)
        b.policies["eviction"] = LRU  # somebody changed it
        async with doomed(tmp_path, {"b": to_b}) as keeper:  # sends what is stored
            await eventually(lambda: to_b.requests, WITHIN_S)
            await keeper.kill()
        async with running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            await gateway.usable(2)
            await Admin(gateway).ok("PUT", "/policies/eviction", {"name": "fifo"})
            b.policies["eviction"] = LRU
            await Admin(gateway).ok("PUT", "/policies/eviction", {"name": "lru"})
            assert await to_b.deliver() == [409]
            assert [a.policies["eviction"]["name"], b.policies["eviction"]["name"]] == ["lru", "lru"]


async def test_a_late_call_that_comes_before_its_swap_is_undone_is_undone_too(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    async with a.started(), b.started(), late_proxy(b.port) as to_b:
        await swap_and_kill(tmp_path, {"a": a, "b": to_b}, [to_b])
        assert await to_b.deliver() == [200]
        assert [a.policies["eviction"], b.policies["eviction"]] == [S3_FIFO, S3_FIFO]
        async with running_gateway(tmp_path, instances=instances({"a": a, "b": b}), admin_key=ADMIN_KEY) as gateway:
            await outcome_is(Admin(gateway), "undone")
            assert [a.policies["eviction"], b.policies["eviction"]] == [LRU, LRU]


async def test_a_fleet_with_an_engine_that_knows_no_fences_swaps_and_goes_back(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    a.fences = None
    b.refused_policies = {"fifo"}
    engines = {"a": a, "b": b}
    async with (
        a.started(),
        b.started(),
        running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway,
    ):
        await gateway.usable(2)
        admin = Admin(gateway)
        await admin.ok("PUT", "/policies/eviction", SAID)
        status, _, said = await admin.call("PUT", "/policies/eviction", {"name": "fifo"})
        assert (status, said["error"]["code"]) == (409, "policy_refused")
        assert [a.policies["eviction"], b.policies["eviction"]] == [S3_FIFO, S3_FIFO]
        a.policies["eviction"] = LRU
        await eventually(lambda: a.policies["eviction"] == S3_FIFO, WITHIN_S)


async def test_a_restored_store_does_not_lock_instances_that_know_newer_fences(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with operated(tmp_path, engine) as (_, admin):
        await admin.ok("PUT", "/policies/eviction", SAID)
        assert engine.fences is not None
        [store] = engine.fences.report()["eviction"]
        engine.fences.accept("eviction", Fence(store, 1000))  # of the store that was lost
        await admin.ok("PUT", "/policies/eviction", {"name": "fifo"})
        assert engine.policies["eviction"]["name"] == "fifo"
        engine.fences.accept("eviction", Fence(store, 10_000))
        engine.policies["eviction"] = LRU
        await eventually(lambda: engine.policies["eviction"]["name"] == "fifo", WITHIN_S)
        assert engine.fences.report()["eviction"][store] > 10_000
        assert await problems(admin) == []


async def test_a_fence_that_somebody_invented_stops_neither_the_keeper_nor_swaps_nor_the_store(tmp_path: Path) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await stack.enter_async_context(engine.started())
        gateway = await stack.enter_async_context(
            running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY)
        )
        await gateway.usable(2)
        admin = Admin(gateway)
        await admin.ok("PUT", "/policies/eviction", {"name": "fifo"})
        fences = engines["a"].fences
        assert fences is not None
        [store] = fences.report()["eviction"]
        fences.accept("eviction", Fence(store, MOST_FENCE))
        engines["a"].policies["eviction"] = LRU
        await eventually(lambda: engines["a"].policies["eviction"]["name"] == "fifo", WITHIN_S)
        await admin.ok("PUT", "/policies/eviction", SAID)
        assert {engine.policies["eviction"]["name"] for engine in engines.values()} == {SAID["name"]}
        others = engines["b"].fences
        assert others is not None
        assert others.report()["eviction"][store] < 1000
        assert await problems(admin) == []


async def test_a_swap_goes_back_to_the_note_of_an_unfinished_one_unless_a_policy_is_stored(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path)
    begun = Action(actor="admin", action="swap", target="policies/eviction", outcome="begun")
    note = UndoNote(policies=[NotedPolicy(instance="a", kind="eviction", name="lru")])
    fifo = Policy(kind="eviction", name="fifo")
    ran = {InstanceId("a"): fifo, InstanceId("b"): fifo}
    operations = Operations(store, lease_s=60)
    number = await store.begin(begun, lease_s=60)
    await store.note(number, note.text(), lease_s=60)

    async def before() -> Mapping[InstanceId, Policy]:
        return await operations.ran_before(ran, (await store.pending()).operations)

    assert await before() == ran
    await store.abandon(number, replace(begun, outcome="rolled_back"))
    assert await before() == {**ran, InstanceId("a"): Policy(kind="eviction", name="lru")}
    await store.apply([Put(kind=Kind.POLICY, name="eviction", body="{}")], action=begun)
    assert await before() == ran
    await store.close()


async def test_a_policy_that_changed_without_a_swap_is_a_problem_until_it_is_back_or_one_is_stored(
    tmp_path: Path,
) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    b.policies["eviction"] = {"kind": "eviction", "name": "fifo", "params": {}}  # as it was started
    engines = {"a": a, "b": b}
    async with (
        a.started(),
        b.started(),
        running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway,
    ):
        await gateway.usable(2)
        admin = Admin(gateway)
        asked = a.policies_asked
        await eventually(lambda: a.policies_asked > asked + 1, WITHIN_S)
        assert await problems(admin) == []

        async def found() -> bool:
            return await problems(admin) == ["policy"]

        async def none() -> bool:
            return await problems(admin) == []

        a.policies["eviction"] = S3_FIFO
        await eventually(found, WITHIN_S)
        [problem] = (await admin.ok("GET", "/status"))["problems"]
        assert problem["subject"] == "policy eviction of instance a"
        assert "it runs 's3fifo' and ran 'lru' before" in problem["message"]
        a.policies["eviction"] = LRU
        await eventually(none, WITHIN_S)
        a.policies["eviction"] = S3_FIFO
        await eventually(found, WITHIN_S)
        await admin.ok("PUT", "/policies/eviction", {"name": "fifo"})
        await eventually(none, WITHIN_S)


def emptied(server: Server) -> None:
    """Replace a store by an empty one."""
    with psycopg.connect(postgres_url(server), autocommit=True) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE tablename LIKE 'kvgate%'").fetchall()
        connection.execute(f"DROP TABLE {', '.join(name for (name,) in tables)}".encode())


def sharing(
    server: Server, state_dir: Path, a: ScriptedEngine, b: ScriptedEngine
) -> AbstractAsyncContextManager[RunningGateway]:
    """Return a gateway of two engines on a store that others use, too."""
    return running_gateway(
        state_dir,
        instances=instances({"a": a, "b": b}),
        admin_key=ADMIN_KEY,
        salt_secret=SECRET,
        store_url=postgres_url(server),
    )


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_store_that_is_replaced_by_an_empty_one_in_the_middle_of_a_swap_is_a_problem_until_a_policy_is_stored(
    tmp_path: Path, *, restarted: bool
) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    with postgres_server() as server:
        async with AsyncExitStack() as stack:
            for engine in (a, b):
                await stack.enter_async_context(engine.started())
            to_b = await stack.enter_async_context(late_proxy(b.port))
            other = sharing(server, tmp_path / "other", a, b)
            async with other as gateway:
                await gateway.usable(2)
                await Admin(gateway).ok("PUT", "/policies/eviction", {"name": "fifo"})
                await swap_and_kill(
                    tmp_path / "killed",
                    {"a": a, "b": to_b},
                    [to_b],
                    KVGATE_SALT_SECRET=SECRET,
                    KVGATE_STORE_URL=postgres_url(server),
                    KVGATE_OPERATION_LEASE_S="600",
                )
                emptied(server)
                if not restarted:
                    await replaced_store_is_a_problem(gateway, a, b)
            if restarted:
                again = sharing(server, tmp_path / "again", a, b)
                await replaced_store_is_a_problem(await stack.enter_async_context(again), a, b)


async def replaced_store_is_a_problem(gateway: RunningGateway, a: ScriptedEngine, b: ScriptedEngine) -> None:
    admin = Admin(gateway)

    async def found(*kinds: str) -> bool:
        return tuple(await problems(admin)) == kinds

    await eventually(partial(found, "policy", "policy"), WITHIN_S)
    assert [a.policies["eviction"]["name"], b.policies["eviction"]["name"]] == ["s3fifo", "fifo"]
    assert await gateway.metric('kvgate_problems{kind="policy"}') == 2
    async with gateway.get("/readyz") as answer:
        assert (await answer.json())["problems"] == {"policy": 2}
    for each in (await admin.ok("GET", "/status"))["problems"]:
        assert "came from the gateways of another store" in each["message"]
    await admin.ok("PUT", "/policies/eviction", {"name": "fifo"})
    await eventually(found, WITHIN_S)
    assert [a.policies["eviction"]["name"], b.policies["eviction"]["name"]] == ["fifo", "fifo"]


async def test_a_policy_that_a_restored_backup_lacks_is_a_problem_until_it_is_stored_again(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    engines = {"a": a, "b": b}
    present, restored = tmp_path / "present", tmp_path / "restored"
    restored.mkdir()
    async with a.started(), b.started():
        async with running_gateway(present, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            await gateway.usable(2)
            await Admin(gateway).ok("PUT", "/tenants/acme", {})
            with (
                closing(sqlite3.connect(present / FILE_NAME)) as store,
                closing(sqlite3.connect(restored / FILE_NAME)) as copy,
            ):
                store.backup(copy)
            await Admin(gateway).ok("PUT", "/policies/eviction", SAID)
        async with running_gateway(restored, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)

            async def found(*kinds: str) -> bool:
                return tuple(await problems(admin)) == kinds

            await eventually(partial(found, "policy", "policy"), WITHIN_S)
            assert [a.policies["eviction"], b.policies["eviction"]] == [S3_FIFO, S3_FIFO]
            await admin.ok("PUT", "/policies/eviction", SAID)
            await eventually(found, WITHIN_S)


async def test_a_policy_that_changed_without_a_swap_stays_a_problem_at_the_next_gateway(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
    b.policies["eviction"] = {"kind": "eviction", "name": "fifo", "params": {}}  # as it was started
    engines = {"a": a, "b": b}
    async with (
        a.started(),
        b.started(),
        aiohttp.ClientSession() as session,
        session.put(f"{a.url}/kv/v1/policy", json={"kind": "eviction", **SAID}) as answer,
    ):
        assert answer.status == 200
        async with running_gateway(tmp_path, instances=instances(engines), admin_key=ADMIN_KEY) as gateway:
            admin = Admin(gateway)

            async def found() -> bool:
                return await problems(admin) == ["policy"]

            await eventually(found, WITHIN_S)
            [problem] = (await admin.ok("GET", "/status"))["problems"]
            assert problem["subject"] == "policy eviction of instance a"
            assert "the store contains no swap that explains this" in problem["message"]
