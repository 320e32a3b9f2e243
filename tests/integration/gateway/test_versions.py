"""Gateways of different versions on one store: older documents, newer ones, and such as nobody can read."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import StateError
from gateway.state import Action, Kind, Put, StoreUnavailableError, open_sqlite
from gateway.state.api_key import KeyDigest
from gateway.state.schema import VERSION
from gateway.state.sqlite import FILE_NAME
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, chat, instances, running_fleet
from tests.support.people import put
from tests.support.previous_release import (
    seen_by_previous_release,
    store_of_previous_release,
    written_by_previous_release,
)
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import ScriptedEngine
from tests.support.stored_revision import revision_of

SECRET = "the same secret everywhere"  # noqa: S105 - of no one
SETTINGS: dict[str, Any] = {"admin_key": ADMIN_KEY, "salt_secret": SECRET, "store_poll_s": 0.05}


async def status_with(gateway: RunningGateway, key: str) -> int:
    async with gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        await answer.read()
        return int(answer.status)


async def answered_by(gateway: RunningGateway, key: str) -> str:
    async with gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        assert answer.status == 200, await answer.text()
        return str(answer.headers["x-kvgate-instance"])


@asynccontextmanager
async def with_a_drained(state_dir: Path) -> AsyncIterator[RunningGateway]:
    """Run a gateway before ``a``, which the store drains, and ``b``."""
    async with ScriptedEngine().started() as a, ScriptedEngine().started() as b:
        named = instances({"a": a, "b": b})
        async with running_gateway(state_dir, instances=named, **SETTINGS) as gateway:
            await gateway.usable(1)
            yield gateway


def digest(key: str) -> str:
    return KeyDigest(SECRET.encode()).of(key.encode()).hex()


def stored(state_dir: Path, kind: Kind, name: str) -> Any:
    with closing(sqlite3.connect(state_dir / FILE_NAME)) as store:
        [[body]] = store.execute(
            "SELECT body FROM kvgate_documents WHERE kind = ? AND name = ?", [kind.value, name]
        ).fetchall()
        return json.loads(body)


async def put_text(state_dir: Path, kind: Kind, name: str, body: str) -> None:
    store = open_sqlite(state_dir)
    try:
        await store.apply([Put(kind=kind, name=name, body=body)], action=Action(actor="t", action="put", target="t"))
    finally:
        await store.close()


async def test_what_this_version_writes_the_previous_one_reads(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        for name in ("acme", "umbra"):
            await admin.ok("PUT", f"/tenants/{name}", {"note": name})
        await admin.ok("PUT", "/tenants/umbra", {"suspended": True})
        await admin.ok("POST", "/keys", {"tenant": "acme", "expires_in_s": 3600})
        revoked = await admin.ok("POST", "/keys", {"tenant": "umbra"})
        await admin.ok("DELETE", f"/keys/{revoked['id']}")
        await admin.ok("PUT", "/quotas/acme", {"requests_per_min": 6, "priority": "high", "kv": {"DDR": {}}})
        await admin.ok("POST", "/instances/a/drain")
        await admin.ok("PUT", "/policies/eviction", {"name": "fifo"})
        await admin.ok("PUT", "/routing", {"policy": "least_load"})
        seen = seen_by_previous_release(tmp_path)
        assert (seen.keys, seen.suspended, seen.draining) == ({"acme"}, {"umbra"}, {"a"})
        assert (seen.policies, seen.routing) == ({"eviction": "fifo"}, "least_load")
        assert (seen.limits["acme"].requests_per_min, seen.limits["acme"].priority) == (6, "high")


async def test_what_the_previous_version_wrote_this_one_reads_and_goes_on_with(tmp_path: Path) -> None:
    digests = {tenant: digest(f"key of {tenant}") for tenant in ("acme", "umbra", "gone")}
    store_of_previous_release(tmp_path, written_by_previous_release(digests))
    async with with_a_drained(tmp_path) as gateway:
        admin = Admin(gateway)
        assert await answered_by(gateway, "key of acme") == "b"
        assert await status_with(gateway, "key of umbra") == 403
        assert await status_with(gateway, "key of gone") == 401
        assert (await admin.ok("GET", "/routing"))["policy"] == "least_load"
        assert (await admin.ok("GET", "/quotas/acme"))["kv"]["DDR"]["burst_bytes"] == 1 << 30
        await admin.ok("POST", "/instances/a/resume")
        await admin.ok("DELETE", "/keys/000000000000")
        assert await status_with(gateway, "key of acme") == 401
        assert (await admin.ok("GET", "/status"))["problems"] == []
    assert seen_by_previous_release(tmp_path).keys == {"umbra"}
    assert seen_by_previous_release(tmp_path).draining == set()


async def test_documents_of_a_newer_version_hold_and_keep_their_unknown_fields(tmp_path: Path) -> None:
    await put(tmp_path, Kind.TENANT, "acme", region={"name": "eu"})
    await put(tmp_path, Kind.KEY, "0" * 12, tenant="acme", digest=digest("k"), scopes=["chat"])
    await put(tmp_path, Kind.KEY, "1" * 12, tenant="acme", digest=digest("old"), scopes=["chat"], revoked_at_s=1.0)
    await put(tmp_path, Kind.INSTANCE, "a", draining=True, zone="z1")
    await put(tmp_path, Kind.ROUTING, "fleet", policy="round_robin", shadow="least_load")
    async with with_a_drained(tmp_path) as gateway:
        admin = Admin(gateway)
        assert await answered_by(gateway, "k") == "b"
        assert await status_with(gateway, "old") == 401
        assert (await admin.ok("GET", "/status"))["problems"] == []
        await admin.ok("POST", "/instances/a/resume")
        await admin.ok("PUT", "/tenants/acme", {"note": "n"})
        await admin.ok("DELETE", f"/keys/{'0' * 12}")
        assert await status_with(gateway, "k") == 401
        at_once = await asyncio.gather(*(admin.call("PUT", "/tenants/acme", {"note": "n"}) for _ in range(8)))
        assert [status for status, _, _ in at_once] == [200] * 8
        status, _, said = await admin.call("PUT", "/tenants/acme", {"region": {}})
        assert (status, said["error"]["param"]) == (400, "region")  # what comes over HTTP is read strictly
    assert stored(tmp_path, Kind.INSTANCE, "a") == {"zone": "z1"}
    assert stored(tmp_path, Kind.TENANT, "acme") == {"note": "n", "region": {"name": "eu"}}
    assert stored(tmp_path, Kind.KEY, "0" * 12).keys() == {"tenant", "digest", "scopes", "revoked_at_s"}


async def test_a_document_that_can_not_be_read_fails_alone_and_is_named(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        keys = {}
        for name in ("acme", "umbra", "gone"):
            await admin.ok("PUT", f"/tenants/{name}", {})
            keys[name] = await admin.ok("POST", "/keys", {"tenant": name})
        for kind in (Kind.QUOTA, Kind.INSTANCE, Kind.POLICY, Kind.PRESET, Kind.PIN, Kind.WORKLOAD):
            await put_text(tmp_path, kind, "current" if kind is Kind.PRESET else "broken", "not JSON")
        await put_text(tmp_path, Kind.ROUTING, "fleet", '{"policy": "of tomorrow"}')
        await put_text(tmp_path, Kind.TENANT, "umbra", '{"suspended": "partly"}')
        await put_text(tmp_path, Kind.KEY, keys["gone"]["id"], '{"tenant": "gone", "digest": 7, "new": 1}')

        async def counted() -> bool:
            return await fleet.gateway.metric('kvgate_problems{kind="document"}') == 9

        await eventually(counted)
        assert await status_with(fleet.gateway, keys["acme"]["key"]) == 200
        assert await status_with(fleet.gateway, keys["umbra"]["key"]) == 403  # what can't be read refuses
        assert await status_with(fleet.gateway, keys["gone"]["key"]) == 401
        problems = {each["subject"]: each["message"] for each in (await admin.ok("GET", "/status"))["problems"]}
        assert problems.keys() == {
            *("quota/broken", "instance/broken", "policy/broken", "pin/broken", "workload/broken"),
            *("preset/current", "routing/fleet", "tenant/umbra", f"key/{keys['gone']['id']}"),
        }
        assert "suspended: Input should be a valid boolean" in problems["tenant/umbra"]
        async with fleet.gateway.get("/readyz") as answer:
            assert (answer.status, (await answer.json())["problems"]) == (200, {"document": 9})
        await _changes_go_on(admin, keys)
        assert await status_with(fleet.gateway, keys["acme"]["key"]) == 401

        async def fewer() -> bool:
            return await fleet.gateway.metric('kvgate_problems{kind="document"}') == 6

        await eventually(fewer)


async def test_a_gateway_starts_on_deeply_nested_documents_of_every_kind_and_revokes_keys(tmp_path: Path) -> None:
    nested = '{"a":' + "[" * 1100 + "]" * 1100 + "}"
    names = {Kind.KEY: "0" * 12, Kind.PRESET: "current", Kind.ROUTING: "fleet", Kind.POLICY: "eviction"}
    for kind in Kind:
        await put_text(tmp_path, kind, names.get(kind, "nested"), nested)
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = await admin.ok("POST", "/keys", {"tenant": "acme"})
        assert await status_with(fleet.gateway, key["key"]) == 200
        await fleet.gateway.counted('kvgate_problems{kind="document"}', len(Kind))
        assert (await admin.ok("DELETE", f"/keys/{key['id']}"))["revoked_at_s"] is not None
        assert await status_with(fleet.gateway, key["key"]) == 401
        assert (await admin.ok("DELETE", f"/keys/{names[Kind.KEY]}"))["revoked_at_s"] is not None
        await admin.ok("PUT", "/tenants/nested", {"note": "n"})
        await fleet.gateway.counted('kvgate_problems{kind="document"}', len(Kind) - 2)


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://10.0.0.1:99999999", "http://8.8.8.8:80", "\x00http://1", "ftp://a"]
)
async def test_a_stored_instance_with_an_unusable_url_is_a_problem_until_it_is_deleted(
    tmp_path: Path, url: str
) -> None:
    await put_text(tmp_path, Kind.INSTANCE, "x", json.dumps({"url": url}))
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        await fleet.gateway.counted('kvgate_problems{kind="document"}', 1)
        [problem] = (await Admin(fleet.gateway).ok("GET", "/status"))["problems"]
        assert problem["subject"] == "url of instance x"
        assert (await Admin(fleet.gateway).call("DELETE", "/instances/x"))[0] < 300
        await fleet.gateway.counted('kvgate_problems{kind="document"}', 0)


UNREADABLE_KEYS = {
    "1" * 12: {"tenant": "acme", "digest": 7, "new": 1},
    "2" * 12: {"tenant": "acme", "digest": digest("two"), "note": "n" * 600},
    "3" * 12: {"tenant": "acme", "digest": digest("three"), "expires_at_s": {"idle_s": 60}},
    "4" * 12: {"tenant": "acme", "digest": digest("four"), "revoked_at_s": {"by": "an operator"}},
    "5" * 12: "no JSON object",
}


@pytest.mark.parametrize("with_tenant", [True, False])
async def test_a_key_that_can_not_be_read_is_no_problem_once_it_is_revoked(
    tmp_path: Path, *, with_tenant: bool
) -> None:
    await put(tmp_path, Kind.TENANT, "acme")
    for name, body in UNREADABLE_KEYS.items():
        await put_text(tmp_path, Kind.KEY, name, json.dumps(body))
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        left = {each["subject"] for each in (await admin.ok("GET", "/status"))["problems"]}
        assert left == {f"key/{name}" for name in UNREADABLE_KEYS}
        if with_tenant:
            assert (await admin.call("DELETE", "/tenants/acme"))[0] == 204
            left = {"key/555555555555"}  # it has no tenant
        else:
            for name in UNREADABLE_KEYS:
                assert (await admin.ok("DELETE", f"/keys/{name}"))["revoked_at_s"] is not None
            left = set()
        assert {each["subject"] for each in (await admin.ok("GET", "/status"))["problems"]} == left
        assert await status_with(fleet.gateway, "two") == 401
    assert stored(tmp_path, Kind.KEY, "1" * 12).keys() == {"tenant", "digest", "new", "revoked_at_s"}


async def test_a_preset_that_this_version_does_not_know_is_a_problem_until_another_one_is_applied(
    tmp_path: Path,
) -> None:
    await put_text(tmp_path, Kind.PRESET, "current", '{"name": "of-tomorrow", "hardware": "cpu"}')
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)

        async def named(*subjects: str) -> None:
            async def found() -> bool:
                return tuple(each["subject"] for each in (await admin.ok("GET", "/status"))["problems"]) == subjects

            await eventually(found)

        await named("the preset of the fleet")
        await admin.ok("PUT", "/presets/current", {"name": "low-latency", "hardware": "cpu"})
        await named()


async def test_the_other_fields_of_a_document_hold_from_the_start_where_one_can_not_be_read(tmp_path: Path) -> None:
    too_long = "n" * 600  # for this version
    for name in ("acme", "umbra"):
        await put(tmp_path, Kind.TENANT, name, note=too_long, suspended=name == "umbra")
        await put(tmp_path, Kind.KEY, f"{len(name):012}", tenant=name, digest=digest(name), note=too_long)
    await put(tmp_path, Kind.KEY, "1" * 12, tenant="acme", digest=digest("old"), note=too_long, revoked_at_s=1.0)
    await put(tmp_path, Kind.KEY, "2" * 12, tenant="acme", digest=digest("bounded"), expires_at_s={"idle_s": 60})
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=2, priority="urgent", kv={"CXL": {"burst_bytes": 7}})
    await put(tmp_path, Kind.INSTANCE, "a", draining=True, role="of tomorrow")
    async with with_a_drained(tmp_path) as gateway:
        assert await answered_by(gateway, "acme") == "b"
        assert [await status_with(gateway, key) for key in ("umbra", "old", "bounded")] == [403, 401, 401]
        assert await answered_by(gateway, "acme") == "b"
        assert await status_with(gateway, "acme") == 429
        assert await gateway.metric('kvgate_problems{kind="document"}') == 7  # not the revoked key


async def _changes_go_on(admin: Admin, keys: dict[str, Any]) -> None:
    """Lists show the others, unreadable ones are refused with a reason or replaced, keys are revoked in any case."""
    assert [each["id"] for each in (await admin.ok("GET", "/tenants"))["data"]] == ["acme", "gone"]
    assert len((await admin.ok("GET", "/keys"))["data"]) == 2
    status, _, said = await admin.call("GET", "/tenants/umbra")
    assert (status, said["error"]["code"]) == (409, "document_unreadable")
    assert (await admin.ok("DELETE", f"/keys/{keys['gone']['id']}"))["revoked_at_s"] is not None
    assert (await admin.call("DELETE", "/tenants/acme"))[0] == 204  # among pins and keys that can't be read
    await admin.ok("PUT", "/tenants/umbra", {})
    await admin.ok("PUT", "/routing", {"policy": "round_robin"})


async def test_a_store_of_a_newer_schema_is_used_where_that_allows_it_and_refused_where_not(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("UPDATE kvgate_schema SET version = ?, oldest = ?", [VERSION + 1, VERSION])
        assert (await revision_of(store)).number == 0
        await store.close()
        again = open_sqlite(tmp_path)
        other.execute("UPDATE kvgate_schema SET version = ?, oldest = ?", [VERSION + 2, VERSION + 1])
        with pytest.raises(StoreUnavailableError, match=f"the store has schema {VERSION + 2}"):
            await revision_of(again)
        await again.close()
        with pytest.raises(StateError, match="start a newer version of kvgate"):
            open_sqlite(tmp_path)
