"""Changes of policies over several gateways of a store: whatever comes between, the fleet ends at one policy."""

import asyncio
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from gateway.api.admin.operations import Operations
from gateway.fleet import Policy
from gateway.fleet.undo_note import NotedPolicy, UndoNote
from gateway.state import Action, Kind, Put, open_sqlite
from kvcontrol.core.ids import InstanceId
from tests.integration.gateway.test_half_done import LRU, S3_FIFO, SAID, WITHIN_S, audited, doomed
from tests.integration.gateway.test_process import listening, start
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.cutting_proxy import cutting_proxy
from tests.support.databases import postgres_server, postgres_url
from tests.support.fleet import instances
from tests.support.running_gateway import GatewayClient, eventually, running_gateway
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
                assert (status, said["error"]["code"]) == (409, "act_lost")
                assert (a.told, b.told) == ([], [])
                assert await outcomes(admin) == [("swap", "undone")]
            finally:
                process.kill()
                await process.wait()
            await drained


async def test_another_gateway_completes_a_rollback_that_an_instance_did_not_answer(tmp_path: Path) -> None:
    a, b = ScriptedEngine(), ScriptedEngine()
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
                return await problems(admin) == ["act"]

            await eventually(named, WITHIN_S)
            assert await outcomes(admin) == [("swap", "rolled_back")]
            b.thaw()
            assert b.policies["eviction"] == S3_FIFO

            async def restored() -> bool:
                return await problems(admin) == [] and b.policies["eviction"] == LRU

            await eventually(restored, WITHIN_S)
            assert await outcomes(admin) == [("swap", "rolled_back")]


async def test_a_swap_goes_back_to_the_note_of_an_unfinished_one_unless_a_policy_is_stored(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path)
    begun = Action(actor="admin", action="swap", target="policies/eviction", outcome="begun")
    note = UndoNote(policies=[NotedPolicy(instance="a", kind="eviction", name="lru")])
    fifo = Policy(kind="eviction", name="fifo")
    ran = {InstanceId("a"): fifo, InstanceId("b"): fifo}
    operations = Operations(store)
    number = await store.begin(begun, lease_s=60)
    await store.note(number, note.text(), lease_s=60)
    assert await operations.ran_before(ran) == ran
    await store.abandon(number, replace(begun, outcome="rolled_back"))
    assert await operations.ran_before(ran) == {**ran, InstanceId("a"): Policy(kind="eviction", name="lru")}
    await store.apply([Put(kind=Kind.POLICY, name="eviction", body="{}")], action=begun)
    assert await operations.ran_before(ran) == ran
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
