"""Tenants, keys, quotas and the audit log through ``/admin/v1``, and what clients then see."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, Fleet, chat, instances, running_fleet
from tests.support.running_gateway import eventually, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one for all that share a gateway


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as running:
        yield running


@pytest.fixture
def admin(fleet: Fleet) -> Admin:
    return Admin(fleet.gateway)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One for all tests in which nothing is changed."""
    async with running_fleet(tmp_path_factory.mktemp("refusing"), admin_key=ADMIN_KEY) as running:
        yield running


async def status_with(fleet: Fleet, key: str) -> int:
    async with fleet.gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        await answer.read()
        return int(answer.status)


async def test_a_key_is_made_shown_once_used_and_revoked(fleet: Fleet, admin: Admin, tmp_path: Path) -> None:
    assert await status_with(fleet, "anything") == 200  # open as long as there is no key
    await admin.ok("PUT", "/tenants/acme", {"note": "the first"})
    made = await admin.ok("POST", "/keys", {"tenant": "acme", "note": "laptop"})
    key = made["key"]
    assert await status_with(fleet, key) == 200
    assert await status_with(fleet, "anything") == 401
    shown = json.dumps([await admin.ok("GET", "/keys"), await admin.ok("GET", "/audit")])
    assert key not in shown
    assert made["id"] in shown
    assert not any(key.encode() in each.read_bytes() for each in tmp_path.iterdir() if each.is_file())
    revoked = await admin.ok("DELETE", f"/keys/{made['id']}")
    assert revoked["revoked_at_s"] > made["created_at_s"]
    assert await status_with(fleet, key) == 401
    assert await status_with(fleet, "anything") == 401  # once closed, closed for good


async def test_a_key_expires(fleet: Fleet, admin: Admin) -> None:
    await admin.ok("PUT", "/tenants/acme", {})
    key = (await admin.ok("POST", "/keys", {"tenant": "acme", "expires_in_s": 0.3}))["key"]

    async def expired() -> bool:
        return await status_with(fleet, key) == 401

    await eventually(expired)


async def test_deleting_a_tenant_revokes_its_keys_and_takes_its_quota(fleet: Fleet, admin: Admin) -> None:
    for name in ("acme", "other"):
        await admin.ok("PUT", f"/tenants/{name}", {})
        await admin.ok("PUT", f"/quotas/{name}", {"requests_per_min": 100})
    keys = {name: (await admin.ok("POST", "/keys", {"tenant": name}))["key"] for name in ("acme", "other")}
    assert (await admin.call("DELETE", "/tenants/acme"))[0] == 204
    assert await status_with(fleet, keys["acme"]) == 401
    assert await status_with(fleet, keys["other"]) == 200
    assert (await admin.call("GET", "/quotas/acme"))[0] == 404
    assert [each["tenant"] for each in (await admin.ok("GET", "/quotas"))["data"]] == ["other"]


async def test_a_quota_counts_at_once_and_its_usage_is_shown(fleet: Fleet, admin: Admin) -> None:
    await admin.ok("PUT", "/tenants/acme", {})
    key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
    await admin.ok("PUT", "/quotas/acme", {"requests_per_min": 3})
    outcomes = Counter(await asyncio.gather(*(status_with(fleet, key) for _ in range(20))))
    assert outcomes == {200: 3, 429: 17}
    usage = await admin.ok("GET", "/quotas/acme/usage")
    assert (usage["requests"], usage["running"]) == (3, 0)
    await admin.ok("PUT", "/quotas/acme", {"requests_per_min": 4})
    assert await status_with(fleet, key) == 200
    await admin.ok("DELETE", "/quotas/acme")
    await admin.ok("PUT", "/quotas/_default", {"requests_per_min": 1})
    assert await status_with(fleet, key) == 429


async def test_two_writers_on_one_version_do_not_overwrite_each_other(admin: Admin) -> None:
    _, headers, _ = await admin.call("PUT", "/tenants/acme", {"note": "1"}, if_none_match="*")
    etag = headers["etag"]
    ended = await asyncio.gather(
        *(admin.call("PUT", "/tenants/acme", {"note": str(number)}, if_match=etag) for number in range(8))
    )
    assert Counter(status for status, _, _ in ended) == {200: 1, 412: 7}
    assert (await admin.call("PUT", "/tenants/acme", {}, if_none_match="*"))[0] == 412
    assert (await admin.call("PUT", "/tenants/nobody", {}, if_match="*"))[0] == 412
    assert (await admin.call("DELETE", "/tenants/acme", if_match=etag))[0] == 412
    status, headers, _ = await admin.call("GET", "/tenants/acme")
    assert (status, headers["etag"]) == (200, '"2"')
    assert (await admin.call("DELETE", "/tenants/acme", if_match='"2"'))[0] == 204


async def test_without_a_precondition_nobody_is_refused_for_coming_second(fleet: Fleet, admin: Admin) -> None:
    await admin.ok("PUT", "/tenants/acme", {})
    await admin.ok("PUT", "/quotas/acme", {"requests_per_min": 100})
    made = await admin.ok("POST", "/keys", {"tenant": "acme"})

    async def at_once(method: str, path: str) -> Counter[int]:
        return Counter(status for status, _, _ in await asyncio.gather(*(admin.call(method, path) for _ in range(8))))

    assert await at_once("DELETE", f"/keys/{made['id']}") == {200: 8}
    assert await status_with(fleet, made["key"]) == 401
    assert await at_once("POST", "/instances/a/drain") == {200: 8}
    assert await at_once("DELETE", "/quotas/acme") == {204: 1, 404: 7}
    assert await at_once("DELETE", "/tenants/acme") == {204: 1, 404: 7}


async def test_a_repeated_request_is_carried_out_once(admin: Admin) -> None:
    await admin.ok("PUT", "/tenants/acme", {})
    ended = await asyncio.gather(
        *(admin.call("POST", "/keys", {"tenant": "acme"}, idempotency_key="once") for _ in range(5))
    )
    assert {status for status, _, _ in ended} == {201}
    assert len({said["id"] for _, _, said in ended}) == 1
    assert sum(said["key"] is not None for _, _, said in ended) == 1  # shown once
    assert sum(headers.get("idempotency-replayed") == "true" for _, headers, _ in ended) == 4
    assert len((await admin.ok("GET", "/keys"))["data"]) == 1
    for method, path, body in (
        ("POST", "/instances", {"id": "new", "url": "http://127.0.0.1:9"}),
        ("DELETE", "/instances/new", None),
        ("DELETE", "/quotas/acme", None),
    ):
        if path.startswith("/quotas"):
            await admin.ok("PUT", path, {"requests_per_min": 100})
        key = f"{method} {path}".replace(" ", "-")
        same = await asyncio.gather(*(admin.call(method, path, body, idempotency_key=key) for _ in range(20)))
        assert len({(status, str(said)) for status, _, said in same}) == 1, "whoever was second is no conflict"
        assert same[0][0] < 300
        assert sum(headers.get("idempotency-replayed") == "true" for _, headers, _ in same) == 19
    status, _, said = await admin.call("POST", "/keys", {"tenant": "acme", "note": "x"}, idempotency_key="once")
    assert (status, said["error"]["code"]) == (422, "idempotency_key_reused")


async def test_changes_are_audited_and_refused_ones_are_not(admin: Admin) -> None:
    await admin.ok("PUT", "/tenants/acme", {"note": "n"}, x_request_id="req-1")
    await admin.call("PUT", "/tenants/acme", {"nothing": 1})
    await admin.ok("PUT", "/quotas/acme", {"concurrency": 2})
    await admin.ok("DELETE", "/tenants/acme")
    log = await admin.ok("GET", "/audit?limit=2")
    assert [(each["action"], each["target"]) for each in log["data"]] == [
        ("delete", "tenants/acme"),
        ("put", "quotas/acme"),
    ]
    rest = await admin.ok("GET", f"/audit?before={log['next_before']}")
    [first] = rest["data"]
    assert (first["actor"], first["request_id"]) == ("admin@127.0.0.1", "req-1")
    assert first["detail"] == {"note": "n", "suspended": False}
    assert rest["next_before"] is None


async def test_everything_is_there_again_after_a_restart(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admin_key=ADMIN_KEY) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
        await admin.ok("PUT", "/quotas/acme", {"requests_per_min": 1})
        async with running_gateway(
            tmp_path, instances=instances(fleet.engines), admin_key=ADMIN_KEY, require_keys=True
        ) as again:
            await again.usable(2)
            other = Fleet(again, fleet.engines)
            assert [await status_with(other, key) for _ in range(2)] == [200, 429]
            log = await Admin(again).ok("GET", "/audit")
            assert [each["action"] for each in log["data"]] == ["put", "create", "put"]


async def test_nobody_without_the_admin_key_gets_in(fleet: Fleet, admin: Admin) -> None:
    await admin.ok("PUT", "/tenants/acme", {})
    user = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
    keys = (None, "", "wrong", user, ADMIN_KEY + "x", ADMIN_KEY[:-1], "ä")
    for path, key in product(("/tenants", "/keys", "/quotas", "/audit", "/tenants/acme"), keys):
        status, headers, said = await Admin(fleet.gateway, key).call("GET", path)
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
        assert said["error"]["code"] in {"missing_admin_key", "invalid_admin_key"}
    assert (await Admin(fleet.gateway, user).call("DELETE", "/tenants/acme"))[0] == 401
    assert await status_with(fleet, ADMIN_KEY) == 401  # and it is no user's


async def test_the_key_is_asked_for_before_the_body_is_looked_at(fleet: Fleet) -> None:
    nobody = Admin(fleet.gateway, "wrong")
    assert (await nobody.call("PUT", "/tenants/acme", {"nothing": 1}))[0] == 401
    assert (await nobody.call("PUT", "/tenants/acme", {"note": "x" * (2 << 20)}))[0] == 401


BAD: list[tuple[str, str, Any, int, str]] = [
    ("PUT", "/tenants/acme", {"nothing": 1}, 400, "nothing"),
    ("PUT", "/tenants/acme", {"suspended": "yes"}, 400, "suspended"),
    ("PUT", "/tenants/acme", [], 400, ""),
    ("PUT", "/tenants/-acme", {}, 400, "name"),
    ("PUT", "/tenants/_default", {}, 400, "name"),
    *(
        ("PUT", "/quotas/acme", {limit: 0}, 400, "suspend the tenant")
        for limit in ("requests_per_min", "tokens_per_min", "concurrency", "context_tokens")
    ),
    ("PUT", "/quotas/acme", {"requests_per_min": 0}, 400, "requests_per_min"),
    ("PUT", "/quotas/acme", {"requests_per_min": False}, 400, "requests_per_min"),
    ("PUT", "/quotas/acme", {"requests_per_min": -1}, 400, "requests_per_min"),
    ("PUT", "/quotas/acme", {"requests_per_min": 1.5}, 400, "requests_per_min"),
    ("PUT", "/quotas/acme", {"priority": "highest"}, 400, "priority"),
    ("PUT", "/quotas/acme", {"weight": 0}, 400, "weight"),
    ("PUT", "/quotas/acme", {"kv": {"L2": {}}}, 400, "kv"),
    ("PUT", "/quotas/acme", {"kv": {"DDR": {"burst_bytes": -1}}}, 400, "burst_bytes"),
    ("POST", "/keys", {"tenant": "nobody"}, 404, "nobody"),
    ("POST", "/keys", {}, 400, "tenant"),
    ("GET", "/keys/zz", None, 400, "key_id"),
    ("GET", "/keys/0123456789ab", None, 404, "0123456789ab"),
    ("GET", "/tenants/acme", None, 404, "acme"),
    ("DELETE", "/quotas/acme", None, 404, "acme"),
    ("GET", "/audit?limit=0", None, 400, "limit"),
    ("GET", "/nothing", None, 404, "/admin/v1/nothing"),
    ("PATCH", "/tenants/acme", {}, 405, "PATCH"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
async def test_a_wrong_request_is_refused_and_says_what_is_wrong(
    refusing: Fleet, case: tuple[str, str, Any, int, str]
) -> None:
    admin = Admin(refusing.gateway)
    method, path, body, status, named = case
    got, _, said = await admin.call(method, path, body)
    assert got == status
    assert named in said["error"]["message"]
    assert "Value error" not in said["error"]["message"]
    assert set(said["error"]) == {"message", "type", "param", "code"}
    assert (await admin.ok("GET", "/audit"))["data"] == []


@pytest.mark.parametrize(
    "headers", [{"if_match": "3"}, {"if_none_match": '"1"'}, {"idempotency_key": "a b"}, {"idempotency_key": "x" * 129}]
)
async def test_a_wrong_condition_is_refused(refusing: Fleet, headers: dict[str, str]) -> None:
    assert (await Admin(refusing.gateway).call("PUT", "/tenants/acme", {}, **headers))[0] == 400


async def test_a_long_body_is_a_413(admin: Admin) -> None:
    assert (await admin.call("PUT", "/tenants/acme", {"note": "x" * (2 << 20)}))[0] == 413


async def test_two_gateways_on_one_store_see_each_others_changes(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path, admin_key=ADMIN_KEY, store_poll_s=0.05) as fleet,
        running_gateway(tmp_path, instances=instances(fleet.engines), admin_key=ADMIN_KEY, store_poll_s=0.05) as second,
    ):
        await second.usable(2)
        one, two = Admin(fleet.gateway), Admin(second)
        await one.ok("PUT", "/tenants/acme", {})
        key = (await two.ok("POST", "/keys", {"tenant": "acme"}))["key"]

        async def known() -> bool:
            return await status_with(fleet, key) == 200 and await status_with(fleet, "anything") == 401

        await eventually(known)
