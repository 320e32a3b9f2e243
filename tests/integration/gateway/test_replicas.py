"""Gateways on several hosts: one PostgreSQL, one Redis, one secret; and what holds while either is away."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.integration.gateway.test_process import refused, start
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.cutting_proxy import cutting_proxy
from tests.support.databases import Server, postgres, postgres_pair, postgres_server, postgres_url, redis_server
from tests.support.fleet import CHAT, chat, instances, running_fleet
from tests.support.running_gateway import RunningGateway, eventually, running_gateway

SECRET = "the same secret everywhere"  # noqa: S105 - of no one


@pytest.fixture
def servers() -> Iterator[tuple[str, Server]]:
    with postgres() as url, redis_server() as redis:
        yield url, redis


async def status_with(gateway: RunningGateway, key: str) -> int:
    async with gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        await answer.read()
        return int(answer.status)


async def test_two_hosts_are_one_gateway(tmp_path: Path, servers: tuple[str, Server]) -> None:
    store_url, redis = servers
    shared = {
        "store_url": store_url,
        "redis_url": f"redis://127.0.0.1:{redis.port}/0",
        "salt_secret": SECRET,
        "admin_key": ADMIN_KEY,
        "store_poll_s": 0.05,
        "require_keys": True,
    }
    async with (
        running_fleet(tmp_path / "one", **shared) as fleet,
        running_gateway(tmp_path / "two", instances=instances(fleet.engines), **shared) as second,
    ):
        await second.usable(2)
        one, two = Admin(fleet.gateway), Admin(second)
        await one.ok("PUT", "/tenants/acme", {})
        await one.ok("PUT", "/quotas/acme", {"requests_per_min": 6})
        key = (await one.ok("POST", "/keys", {"tenant": "acme"}))["key"]

        async def known() -> bool:
            return (await two.ok("GET", "/quotas/acme/usage"))["requests"] > 0 or await status_with(second, key) == 200

        await eventually(known)
        await fleet.gateway.usable(2)
        used = (await two.ok("GET", "/quotas/acme/usage"))["requests"]
        got = [await status_with(gateway, key) for gateway in (fleet.gateway, second) * 4]
        assert got.count(200) == 6 - used
        assert got.count(429) == 8 - (6 - used)
        salts = {each["x-kvgate-cache-salt"] for engine in fleet.engines.values() for each in engine.headers}
        assert len(salts) == 1  # the same tenant finds its cached blocks through either
        assert (await one.call("PUT", "/tenants/acme", {}, if_match='"9"'))[0] == 412


def either_of(primary: Server, standby: Server) -> dict[str, Any]:
    """Return the settings of a gateway that uses whichever of both takes writes."""
    hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
    return {
        "store_url": f"postgresql://kvgate@{hosts}/postgres",
        "salt_secret": SECRET,
        "admin_key": ADMIN_KEY,
        "store_poll_s": 0.05,
    }


async def test_a_standby_takes_over(tmp_path: Path) -> None:
    with postgres_pair() as (primary, standby):
        shared = either_of(primary, standby)
        async with running_fleet(tmp_path, **shared) as fleet:
            admin = Admin(fleet.gateway)
            await admin.ok("PUT", "/tenants/acme", {})
            key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
            with psycopg.connect(postgres_url(standby), autocommit=True) as follower:

                def followed() -> bool:
                    [[count]] = follower.execute("SELECT count(*) FROM kvgate_audit").fetchall()
                    return bool(count == 2)

                await eventually(followed)
                primary.kill()
                follower.execute("SELECT pg_promote()")

            async def changed() -> bool:
                return (await admin.call("PUT", "/tenants/other", {}))[0] == 200

            await eventually(changed)
            assert await status_with(fleet.gateway, key) == 200
            assert [each["id"] for each in (await admin.ok("GET", "/tenants"))["data"]] == ["acme", "other"]

            async def no_problem() -> bool:
                return not (await admin.ok("GET", "/status"))["problems"]

            await eventually(no_problem)


async def test_gateways_follow_a_standby_that_lacks_the_last_change(tmp_path: Path) -> None:
    with postgres_pair() as (primary, standby):
        async with running_fleet(tmp_path, **either_of(primary, standby)) as fleet:
            admin = Admin(fleet.gateway)
            await admin.ok("PUT", "/tenants/acme", {})
            made = await admin.ok("POST", "/keys", {"tenant": "acme"})
            with psycopg.connect(postgres_url(standby), autocommit=True) as follower:

                def rows(query: str, count: int) -> bool:
                    return bool(follower.execute(query).fetchall() == [(count,)])

                await eventually(lambda: rows("SELECT count(*) FROM kvgate_audit", 2))
                follower.execute("ALTER SYSTEM SET primary_conninfo = ''")
                follower.execute("SELECT pg_reload_conf()")
                await eventually(lambda: rows("SELECT count(*) FROM pg_stat_wal_receiver", 0))
                await admin.ok("DELETE", f"/keys/{made['id']}")
                assert await status_with(fleet.gateway, made["key"]) == 401
                primary.kill()
                follower.execute("SELECT pg_promote()")

            async def as_the_standby_has_it() -> bool:
                return await status_with(fleet.gateway, made["key"]) == 200

            await eventually(as_the_standby_has_it)
            assert [each["action"] for each in (await admin.ok("GET", "/audit"))["data"]] == ["create", "put"]
            await admin.ok("DELETE", f"/keys/{made['id']}")
            assert await status_with(fleet.gateway, made["key"]) == 401


async def test_a_standby_is_refused_as_the_store_at_the_start_and_later(tmp_path: Path) -> None:
    with postgres_pair() as (primary, standby), cutting_proxy(primary.port) as proxy:
        code, said = await refused(await start(tmp_path / "second", KVGATE_STORE_URL=postgres_url(standby)))
        assert code == 2
        assert "store_url: PostgreSQL can't be used" in said
        assert "standby" in said
        shared = either_of(primary, standby) | {"store_url": f"postgresql://kvgate@127.0.0.1:{proxy.port}/postgres"}
        async with running_fleet(tmp_path, **shared) as fleet:
            admin = Admin(fleet.gateway)
            await admin.ok("PUT", "/tenants/acme", {})
            proxy.target_port = standby.port
            with psycopg.connect(postgres_url(primary), autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'kvgate'"
                )

            async def named() -> bool:
                problems = (await admin.ok("GET", "/status"))["problems"]
                return [each["kind"] for each in problems] == ["store"] and "standby" in problems[0]["message"]

            await eventually(named)
            proxy.target_port = primary.port

            async def changed() -> bool:
                return (await admin.call("PUT", "/tenants/other", {}))[0] == 200

            await eventually(changed)


async def test_without_the_store_known_keys_are_served_and_changes_are_a_503(tmp_path: Path) -> None:
    with postgres_server() as server:
        shared = {
            "store_url": postgres_url(server),
            "salt_secret": SECRET,
            "admin_key": ADMIN_KEY,
            "store_poll_s": 0.05,
        }
        async with running_fleet(tmp_path, **shared) as fleet:
            admin = Admin(fleet.gateway)
            await admin.ok("PUT", "/tenants/acme", {})
            key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
            server.end()
            status, headers, said = await admin.call("PUT", "/tenants/other", {})
            assert (status, said["error"]["code"]) == (503, "store_unavailable")
            assert int(headers["retry-after"]) > 0
            assert await status_with(fleet.gateway, key) == 200
            assert await status_with(fleet.gateway, "wrong") == 401
            server.again()

            async def changed() -> bool:
                return (await admin.call("PUT", "/tenants/other", {}))[0] == 200

            await eventually(changed)
