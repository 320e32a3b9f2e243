"""What an instance says of itself to one of several gateways, all of them hear through Redis."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.registry.redis_leases import RedisLeaseBoard
from kvcontrol.core.ids import InstanceId
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.databases import Server, redis_server
from tests.support.fleet import instances
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import ScriptedEngine


class Two(NamedTuple):
    first: RunningGateway
    second: RunningGateway
    engine: ScriptedEngine
    redis: Server

    async def lease(self, gateway: RunningGateway, ttl_s: float, name: str = "self-1") -> None:
        body = {"url": self.engine.url, "ttl_s": ttl_s}
        await Admin(gateway).ok("PUT", f"/instances/{name}/lease", body)

    async def leases(self, gateway: RunningGateway) -> dict[str, float]:
        """Self-registered instances that get requests, and how long their leases hold."""
        found = (await Admin(gateway).ok("GET", "/instances"))["data"]
        return {each["id"]: each["lease_left_s"] for each in found if each["source"] == "self" and not each["draining"]}

    async def both_have(self, names: set[str]) -> None:
        async def there() -> bool:
            return all([set(await self.leases(one)) == names for one in (self.first, self.second)])

        await eventually(there, 60.0)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    with redis_server() as redis:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(ScriptedEngine(kv=False).started())
            other = await stack.enter_async_context(ScriptedEngine(kv=False).started())
            shared = {"admin_key": ADMIN_KEY, "redis_url": f"redis://127.0.0.1:{redis.port}/0", "drain_timeout_s": 0.2}
            first = await stack.enter_async_context(running_gateway(tmp_path / "1", **shared))
            second = await stack.enter_async_context(
                running_gateway(tmp_path / "2", instances=instances({"taken": other}), **shared)
            )
            yield Two(first, second, engine, redis)


async def test_a_lease_holds_in_both_until_a_goodbye_or_until_nobody_renews_it(two: Two) -> None:
    await two.lease(two.first, 600)
    await two.both_have({"self-1"})
    await Admin(two.second).ok("DELETE", "/instances/self-1/lease")  # whichever of the two it reaches
    await two.both_have(set())
    await two.lease(two.second, 600)
    await two.both_have({"self-1"})
    await two.lease(two.first, 1.5)
    await two.both_have(set())


async def test_while_the_board_is_away_no_lease_runs_out_and_afterwards_each_has_its_time_again(two: Two) -> None:
    await two.lease(two.first, 4)
    await two.both_have({"self-1"})
    two.redis.kill()

    async def run_out_on_paper() -> bool:
        return all([(await two.leases(one)).get("self-1") == 0 for one in (two.first, two.second)])

    await eventually(run_out_on_paper, 60.0)
    await two.lease(two.first, 600)  # it can't be passed on now
    two.redis.again()

    async def has_all_of_it() -> bool:
        return (await two.leases(two.second)).get("self-1", 0) > 60

    await eventually(has_all_of_it)


async def test_a_goodbye_while_the_board_is_away_reaches_the_others_later(two: Two) -> None:
    await two.lease(two.first, 600)
    await two.both_have({"self-1"})
    two.redis.kill()
    await Admin(two.first).ok("DELETE", "/instances/self-1/lease")
    assert await two.leases(two.first) == {}
    assert set(await two.leases(two.second)) == {"self-1"}
    two.redis.again()
    await two.both_have(set())


async def test_a_word_that_is_passed_on_late_does_not_undo_what_was_said_after_it() -> None:
    name = InstanceId("self-1")
    with redis_server() as redis:
        board = RedisLeaseBoard(f"redis://127.0.0.1:{redis.port}/0")
        await board.post(name, "http://127.0.0.1:1", ttl_s=60)
        await board.post(name, "", ttl_s=60, age_s=5)
        assert (await board.read())[name].url == "http://127.0.0.1:1"
        await board.post(name, "", ttl_s=60)
        assert (await board.read())[name].url == ""
        await board.post(name, "http://127.0.0.1:1", ttl_s=600, age_s=5)
        assert (await board.read())[name].url == ""
        await board.close()


async def test_a_name_that_is_taken_elsewhere_is_said_and_left_alone(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await two.lease(two.first, 600, name="taken")
        await eventually(lambda: "'taken' is named by settings" in caplog.text)
    (there,) = (await Admin(two.second).ok("GET", "/instances"))["data"]
    assert (there["id"], there["source"]) == ("taken", "settings")


async def test_an_address_that_is_not_allowed_here_is_not_taken_from_the_board(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    board = RedisLeaseBoard(f"redis://127.0.0.1:{two.redis.port}/0")
    with caplog.at_level(logging.WARNING):
        await board.post(InstanceId("inside"), "http://169.254.169.254", ttl_s=60)
        await eventually(lambda: "169.254.169.254 is never an instance's" in caplog.text)
    await board.close()
    assert await two.leases(two.first) == {}
