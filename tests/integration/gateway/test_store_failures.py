"""What clients and admins get while PostgreSQL hangs, is away, or loses a connection; and what is never done later."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.integration.gateway.test_process import refused, start
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.cutting_proxy import cutting_proxy
from tests.support.databases import Server, postgres_server, postgres_url
from tests.support.fleet import CHAT, chat, instances, running_fleet
from tests.support.running_gateway import RunningGateway, eventually, running_gateway

SECRET = "the same secret everywhere"  # noqa: S105 - of no one
CONFIGURED = "sk-of-the-settings"


@pytest.fixture
def server() -> Iterator[Server]:
    with postgres_server() as running:
        yield running


def settings(port: int, **more: Any) -> dict[str, Any]:
    return {
        "store_url": f"postgresql://kvgate@127.0.0.1:{port}/postgres",
        "salt_secret": SECRET,
        "admin_key": ADMIN_KEY,
        "store_poll_s": 0.05,
        "store_timeout_s": 0.5,
        "api_keys": [{"key": CONFIGURED, "tenant": "of-the-settings"}],
        **more,
    }


async def answer_with(gateway: RunningGateway, key: str) -> tuple[int, str | None]:
    async with gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        said = await answer.json()
        return int(answer.status), said.get("error", {}).get("code")


async def new_key(admin: Admin) -> Any:
    await admin.ok("PUT", "/tenants/acme", {})
    return await admin.ok("POST", "/keys", {"tenant": "acme"})


def connections(server: Server) -> set[int]:
    """Return the processes of PostgreSQL that serve gateways."""
    with psycopg.connect(postgres_url(server), autocommit=True) as connection:
        found = connection.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'kvgate'").fetchall()
        return {pid for (pid,) in found}


async def cut_off(server: Server) -> None:
    """End the connections of gateways: they open new ones."""
    present = connections(server)
    for pid in present:
        psutil.Process(pid).send_signal(signal.SIGTERM)
    await eventually(lambda: not present & connections(server))


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Stop them while the block runs."""
    try:
        for each in processes:
            each.suspend()
        yield
    finally:
        for each in processes:
            each.resume()


def everything(server: Server) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


async def test_a_hung_connection_is_given_up_and_a_key_that_was_revoked_meanwhile_is_refused(
    tmp_path: Path, server: Server
) -> None:
    async with running_fleet(tmp_path / "one", **settings(server.port)) as fleet:
        hung = connections(server)
        async with running_gateway(
            tmp_path / "two", instances=instances(fleet.engines), **settings(server.port)
        ) as second:
            key = await new_key(Admin(second))

            async def known() -> bool:
                return (await answer_with(fleet.gateway, key["key"]))[0] == 200

            await eventually(known)
            with stopped([psutil.Process(pid) for pid in hung]):
                await Admin(second).ok("DELETE", f"/keys/{key['id']}")

                async def refused() -> bool:
                    return await answer_with(fleet.gateway, key["key"]) == (401, "invalid_api_key")

                await eventually(refused)
                assert not connections(server) <= hung


async def test_a_revoked_key_is_refused_after_four_replies_of_a_slow_database(tmp_path: Path, server: Server) -> None:
    """The one on its way, one of each loop that was first, and the one with the keys."""
    with cutting_proxy(server.port) as proxy:
        async with (
            running_fleet(tmp_path / "one", **settings(proxy.port, store_timeout_s=60)) as fleet,
            running_gateway(tmp_path / "two", instances=[], **settings(server.port)) as second,
        ):
            key = await new_key(Admin(second))

            async def known() -> bool:
                return (await answer_with(fleet.gateway, key["key"]))[0] == 200

            await eventually(known)
            proxy.allow(0)
            await eventually(lambda: proxy.waiting)
            await Admin(second).ok("DELETE", f"/keys/{key['id']}")
            before = proxy.passed
            while await known():
                passed = proxy.passed
                proxy.allow(1)
                await eventually(lambda: proxy.passed > passed and proxy.waiting)  # noqa: B023 - awaited here
            proxy.allow(None)
            assert proxy.passed - before <= 4


async def test_stored_keys_are_trusted_for_a_stated_time_and_then_refused_until_they_can_be_confirmed(
    tmp_path: Path, server: Server
) -> None:
    async with running_fleet(tmp_path, **settings(server.port, store_trust_s=1.0)) as fleet:
        gateway, admin = fleet.gateway, Admin(fleet.gateway)
        key = (await new_key(admin))["key"]
        server.end()

        async def unconfirmed() -> bool:
            return await answer_with(gateway, key) == (503, "keys_unconfirmed")

        await eventually(unconfirmed)
        assert await answer_with(gateway, CONFIGURED) == (200, None)
        assert await answer_with(gateway, "nobody's") == (401, "invalid_api_key")
        async with gateway.get("/readyz") as answer:
            said = await answer.json()
            assert (answer.status, said["status"], said["problems"]) == (
                503,
                "stored keys can't be confirmed: the store is away",
                {"store": 1},
            )
        server.again()

        async def confirmed() -> bool:
            return await answer_with(gateway, key) == (200, None)

        await eventually(confirmed)
        async with gateway.get("/readyz") as answer:
            assert (answer.status, (await answer.json())["problems"]) == (200, {})


async def test_what_was_refused_while_the_database_hung_is_not_done_later(tmp_path: Path, server: Server) -> None:
    async with running_fleet(tmp_path, **settings(server.port, store_timeout_s=1.0)) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/before", {})
        with stopped(everything(server)):
            refused = await asyncio.gather(*(admin.call("PUT", f"/tenants/t{number}", {}) for number in range(30)))
        assert {(status, said["error"]["code"]) for status, _, said in refused} == {(503, "store_unavailable")}

        async def changed() -> bool:
            return (await admin.call("PUT", "/tenants/after", {}))[0] == 200

        await eventually(changed)
        names = [each["id"] for each in (await admin.ok("GET", "/tenants"))["data"]]
        assert names == ["after", "before"]
        assert {each["target"] for each in (await admin.ok("GET", "/audit"))["data"]} == {
            "tenants/before",
            "tenants/after",
        }


async def test_a_change_whose_commit_got_no_answer_is_unknown_and_its_idempotency_key_settles_it(
    tmp_path: Path, server: Server
) -> None:
    with cutting_proxy(server.port) as proxy:
        async with running_fleet(tmp_path, **settings(proxy.port, store_poll_s=3600, store_timeout_s=20)) as fleet:
            admin = Admin(fleet.gateway)
            await admin.ok("PUT", "/tenants/before", {})
            proxy.cut_at(b"COMMIT")
            status, headers, said = await admin.call("PUT", "/tenants/acme", {}, idempotency_key="once")
            assert (status, said["error"]["code"], proxy.cuts) == (503, "outcome_unknown", 1)
            assert int(headers["retry-after"]) > 0
            status, headers, said = await admin.call("PUT", "/tenants/acme", {}, idempotency_key="once")
            assert (status, headers["idempotency-replayed"], said["version"]) == (200, "true", 1)


async def test_a_connection_that_died_unnoticed_costs_no_answer(tmp_path: Path, server: Server) -> None:
    async with running_fleet(tmp_path, **settings(server.port, store_poll_s=3600, store_timeout_s=20)) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/before", {})
        server.end()
        server.again()
        await admin.ok("PUT", "/tenants/after", {})
        for pid in connections(server):
            psutil.Process(pid).send_signal(signal.SIGTERM)
        await eventually(lambda: not connections(server))
        assert len((await admin.ok("GET", "/tenants"))["data"]) == 2


async def test_a_connection_that_is_cut_before_the_commit_costs_no_answer_either(
    tmp_path: Path, server: Server
) -> None:
    with cutting_proxy(server.port) as proxy:
        async with running_fleet(tmp_path, **settings(proxy.port, store_poll_s=3600, store_timeout_s=20)) as fleet:
            admin = Admin(fleet.gateway)
            proxy.cut_at(b"INSERT INTO kvgate_documents")
            assert (await admin.ok("PUT", "/tenants/acme", {}))["version"] == 1
            assert proxy.cuts == 1
            assert len((await admin.ok("GET", "/audit"))["data"]) == 1


async def test_a_key_whose_revocation_a_read_only_database_refused_is_accepted_until_a_revocation_succeeds(
    tmp_path: Path, server: Server
) -> None:
    """PostgreSQL is read-only where a provider's disk is full."""
    async with running_fleet(tmp_path, **settings(server.port, store_timeout_s=20)) as fleet:
        admin = Admin(fleet.gateway)
        key = await new_key(admin)
        with psycopg.connect(postgres_url(server), autocommit=True) as connection:
            connection.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
            await cut_off(server)
            status, _, said = await admin.call("DELETE", f"/keys/{key['id']}")
            assert (status, said["error"]["code"]) == (503, "store_unavailable")
            assert "read-only transaction" in said["error"]["message"]
            assert await answer_with(fleet.gateway, key["key"]) == (200, None)
            connection.execute("ALTER DATABASE postgres RESET default_transaction_read_only")
            await cut_off(server)
        await admin.ok("DELETE", f"/keys/{key['id']}")
        assert await answer_with(fleet.gateway, key["key"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    "moment", ["", "SELECT tablename FROM pg_tables", "pg_advisory_xact_lock", "CREATE TABLE", "COMMIT"]
)
async def test_a_gateway_does_not_wait_at_its_start_for_a_database_that_goes_silent(
    tmp_path: Path, server: Server, moment: str
) -> None:
    with cutting_proxy(server.port) as proxy:
        proxy.hold_at(moment.encode())
        code, said = await refused(
            await start(
                tmp_path,
                KVGATE_STORE_URL=f"postgresql://kvgate:of-no-one@127.0.0.1:{proxy.port}/postgres",
                KVGATE_SALT_SECRET=SECRET,
                KVGATE_ADMIN_KEY=ADMIN_KEY,
                KVGATE_STORE_TIMEOUT_S="1",
            )
        )
        assert proxy.holding
    assert code == 2
    assert "store_url: PostgreSQL can't be used" in said
    assert f"127.0.0.1, port {proxy.port}" in said
    assert "did not answer within 2 s" in said
    assert "then start the gateway again" in said
    assert "of-no-one" not in said
    assert "Traceback" not in said
