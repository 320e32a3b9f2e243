"""An engine that takes no salt keeps no tenants apart: it is warned of, or not used, once there are several."""

import logging
from pathlib import Path

import pytest

from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, chat, running_fleet
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_engine import ScriptedEngine

ONE = [{"key": "acme-key", "tenant": "acme"}]
TWO = [*ONE, {"key": "umbra-key", "tenant": "umbra"}]
WARNING = "its prefix cache knows no tenants"


async def answered(gateway: RunningGateway, key: str = "acme-key") -> tuple[int, str | None]:
    async with gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        await answer.read()
        return answer.status, answer.headers.get("x-kvgate-instance")


def plain_and_salted() -> dict[str, ScriptedEngine]:
    return {"plain": ScriptedEngine(kv=False), "salted": ScriptedEngine()}


async def test_with_one_tenant_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_fleet(
        tmp_path, plain_and_salted(), api_keys=ONE, isolation="strict", routing_policy="round_robin"
    ) as fleet:
        assert {(await answered(fleet.gateway))[0] for _ in range(4)} == {200}
        for name, told in (("plain", set()), ("salted", {"cache-salt", "priority", "deadline-ms"})):
            for headers in fleet.engines[name].headers:
                private = {each.removeprefix("x-kvgate-") for each in headers if each.startswith("x-kvgate-")}
                assert private == told, name
        assert all(each.headers for each in fleet.engines.values())
    assert WARNING not in caplog.text


@pytest.mark.parametrize("keys", [TWO, []], ids=["two tenants", "any key"])
async def test_with_several_each_such_engine_is_warned_of_once_and_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: list[dict[str, str]]
) -> None:
    async with running_fleet(tmp_path, plain_and_salted(), api_keys=keys, routing_policy="round_robin") as fleet:
        assert {(await answered(fleet.gateway))[1] for _ in range(2)} == {"plain", "salted"}
    said = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert len(said) == 1
    assert "instance plain" in said[0]
    assert not [each for each in caplog.records if each.levelno > logging.WARNING]


async def test_strict_leaves_it_out_in_the_moment_a_second_tenant_gets_a_key(tmp_path: Path) -> None:
    async with running_fleet(
        tmp_path,
        plain_and_salted(),
        api_keys=ONE,
        admin_key=ADMIN_KEY,
        isolation="strict",
        routing_policy="round_robin",
    ) as fleet:
        gateway, admin = fleet.gateway, Admin(fleet.gateway)
        assert {(await answered(gateway))[1] for _ in range(2)} == {"plain", "salted"}
        await admin.ok("PUT", "/tenants/umbra", {})
        made = await admin.ok("POST", "/keys", {"tenant": "umbra"})
        assert {await answered(gateway, key) for key in ("acme-key", made["key"]) * 3} == {(200, "salted")}
        async with gateway.get("/readyz") as answer:
            said = (await answer.json())["instances"]["plain"]
        assert said["state"] == "unhealthy"
        assert "isolation is strict" in said["reason"]
        await admin.ok("DELETE", f"/keys/{made['id']}")
        await gateway.usable(2)


async def test_strict_with_nothing_but_such_engines_is_a_503(tmp_path: Path) -> None:
    async with running_fleet(
        tmp_path, {"plain": ScriptedEngine(kv=False)}, api_keys=ONE, admin_key=ADMIN_KEY, isolation="strict"
    ) as fleet:
        assert await answered(fleet.gateway) == (200, "plain")
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/umbra", {})
        await admin.ok("POST", "/keys", {"tenant": "umbra"})
        assert await answered(fleet.gateway) == (503, None)
