"""Quotas while Redis restarts, drops connections, or answers nobody; and a Redis that would forget them."""

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import redis

from gateway.state import Kind
from tests.integration.gateway.test_process import refused, start
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.cutting_proxy import cutting_proxy
from tests.support.databases import Server, redis_server
from tests.support.fleet import CHAT, chat, running_fleet
from tests.support.people import put
from tests.support.running_gateway import RunningGateway, eventually

SETTINGS: dict[str, Any] = {"api_keys": [{"key": "k", "tenant": "acme"}], "admin_key": ADMIN_KEY}


def url_of(port: int) -> str:
    return f"redis://127.0.0.1:{port}/0"


async def burst(gateway: RunningGateway, count: int) -> Counter[int]:
    async def one() -> int:
        async with gateway.post(CHAT, chat(), authorization="Bearer k") as answer:
            await answer.read()
            return int(answer.status)

    return Counter(await asyncio.gather(*(one() for _ in range(count))))


def drop_all(server: Server) -> None:
    with redis.Redis.from_url(url_of(server.port)) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def test_kept_connections_that_died_cost_no_request(tmp_path: Path) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=10_000)
    with redis_server() as server:
        async with running_fleet(tmp_path, redis_url=url_of(server.port), **SETTINGS) as fleet:
            assert await burst(fleet.gateway, 60) == {200: 60}
            await asyncio.to_thread(drop_all, server)
            assert await burst(fleet.gateway, 60) == {200: 60}
            await asyncio.to_thread(server.end)
            await asyncio.to_thread(server.again)
            assert await burst(fleet.gateway, 120) == {200: 120}


async def test_a_reservation_whose_answer_was_lost_is_made_again_and_counts_once(tmp_path: Path) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=2, concurrency=1)
    with redis_server() as server, cutting_proxy(server.port) as proxy:
        async with running_fleet(tmp_path, redis_url=url_of(proxy.port), **SETTINGS) as fleet:
            admin = Admin(fleet.gateway)
            assert await burst(fleet.gateway, 1) == {200: 1}
            proxy.cut_at(b"EVALSHA")
            assert await burst(fleet.gateway, 1) == {200: 1}
            assert proxy.cuts == 1
            assert (await admin.ok("GET", "/quotas/acme/usage"))["requests"] == 2
            assert await burst(fleet.gateway, 1) == {429: 1}


async def test_while_redis_hangs_tenants_without_a_quota_are_served_and_what_ends_is_settled_later(
    tmp_path: Path,
) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=10, concurrency=2)
    keys = [*SETTINGS["api_keys"], {"key": "free", "tenant": "other"}]
    with redis_server() as server:
        async with running_fleet(tmp_path, redis_url=url_of(server.port), **(SETTINGS | {"api_keys": keys})) as fleet:
            gates = {name: asyncio.Event() for name in fleet.engines}
            for name, engine in fleet.engines.items():
                engine.gate = gates[name]
            running = asyncio.create_task(burst(fleet.gateway, 2))
            await eventually(lambda: sum(each.active for each in fleet.engines.values()) == 2)
            server.process.send_signal(signal.SIGSTOP)
            try:
                for gate in gates.values():
                    gate.set()
                assert await running == {200: 2}
                async with fleet.gateway.post(CHAT, chat(), authorization="Bearer free") as answer:
                    assert answer.status == 200
                async with fleet.gateway.post(CHAT, chat(), authorization="Bearer k") as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (503, "quotas_unavailable")
            finally:
                server.process.send_signal(signal.SIGCONT)
            admin = Admin(fleet.gateway)

            async def settled() -> bool:
                return (await admin.ok("GET", "/quotas/acme/usage"))["running"] == 0

            await eventually(settled)


async def test_a_redis_that_would_evict_quotas_is_refused_at_the_start(tmp_path: Path) -> None:
    for policy in ("allkeys-lru", "volatile-ttl"):
        with redis_server("--maxmemory", "100mb", "--maxmemory-policy", policy) as server:
            code, said = await refused(await start(tmp_path, KVGATE_REDIS_URL=url_of(server.port)))
            assert code == 2
            assert f"maxmemory-policy {policy}" in said
            assert "set maxmemory-policy noeviction" in said


async def problem(gateway: RunningGateway) -> str:
    """Return what operators are shown of Redis, "" where nothing is wrong."""
    problems = (await Admin(gateway).ok("GET", "/status"))["problems"]
    return "".join(each["message"] for each in problems if each["kind"] == "redis")


async def test_a_redis_that_is_away_or_comes_back_with_another_policy_is_a_problem_while_it_lasts(
    tmp_path: Path,
) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=10_000)
    with redis_server("--maxmemory", "100mb", "--maxmemory-policy", "noeviction") as server:
        async with running_fleet(tmp_path, redis_url=url_of(server.port), **SETTINGS) as fleet:

            async def named(text: str) -> None:
                async def found() -> bool:
                    shown = await problem(fleet.gateway)
                    return text in shown if text else not shown

                await eventually(found, 60.0)

            await asyncio.to_thread(server.end)
            await named("Redis can't be used")
            await asyncio.to_thread(server.again)
            await named("")
            for name, value, shown in (
                ("maxmemory-policy", "allkeys-lru", "maxmemory-policy allkeys-lru"),
                ("maxmemory-policy", "noeviction", ""),
                ("maxmemory", "1kb", "the memory of Redis is full"),
                ("maxmemory", "100mb", ""),
            ):
                with redis.Redis.from_url(url_of(server.port)) as client:
                    client.config_set(name, value)
                await named(shown)
                assert await burst(fleet.gateway, 3) == {503 if "full" in shown else 200: 3}


async def test_an_address_that_leads_to_another_primary_costs_no_request(tmp_path: Path) -> None:
    await put(tmp_path, Kind.QUOTA, "acme", requests_per_min=10_000)
    with redis_server() as old, redis_server() as new, cutting_proxy(old.port) as proxy:
        async with running_fleet(tmp_path, redis_url=url_of(proxy.port), **SETTINGS) as fleet:
            assert await burst(fleet.gateway, 40) == {200: 40}
            proxy.target_port = new.port
            with redis.Redis.from_url(url_of(old.port)) as client:
                client.execute_command("REPLICAOF", "127.0.0.1", new.port)
            assert await burst(fleet.gateway, 80) == {200: 80}
            with redis.Redis.from_url(url_of(new.port)) as client:
                assert client.keys("kvgate:quota:*")


async def test_a_replica_is_refused_at_the_start(tmp_path: Path) -> None:
    with redis_server() as primary, redis_server("--replicaof", f"127.0.0.1 {primary.port}") as replica:
        code, said = await refused(await start(tmp_path, KVGATE_REDIS_URL=url_of(replica.port)))
        assert code == 2
        assert "Redis is a read-only replica" in said
        assert "name the primary" in said


async def test_a_redis_of_bounded_memory_that_evicts_nothing_is_taken(tmp_path: Path) -> None:
    with redis_server("--maxmemory", "100mb", "--maxmemory-policy", "noeviction") as server:
        async with running_fleet(tmp_path, redis_url=url_of(server.port), **SETTINGS) as fleet:
            assert await burst(fleet.gateway, 1) == {200: 1}
