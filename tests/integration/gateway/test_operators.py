"""Operators' data on the clients' listener: who gets it."""

from pathlib import Path

import pytest

from tests.support.admin import ADMIN_KEY
from tests.support.browser import browsing, chromium
from tests.support.fleet import CHAT, chat, running_fleet
from tests.support.running_gateway import RunningGateway

METRICS_KEY = "metrics-key-of-prometheus"
KEYS = [{"key": "sk-acme", "tenant": "acme"}, {"key": "sk-umbra", "tenant": "umbra"}]
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what the gateway believes; the tests listen on loopback
DATA = ("/metrics", "/dashboard/fleet")


async def status(gateway: RunningGateway, path: str, key: str | None = None, **headers: str) -> int:
    bearer = {} if key is None else {"authorization": f"Bearer {key}"}
    async with gateway.get(path, **bearer, **headers) as answer:
        await answer.read()
        return int(answer.status)


async def named(gateway: RunningGateway, **headers: str) -> set[str]:
    """The instances that /readyz names."""
    async with gateway.get("/readyz", **headers) as answer:
        said = await answer.json()
    assert (answer.status, said["status"], said["usable"]) == (200, "ready", 2)
    return set(said["instances"])


async def test_beyond_loopback_tenants_see_no_operators_data(tmp_path: Path) -> None:
    settings = {"host": EVERYWHERE, "api_keys": KEYS, "admin_key": ADMIN_KEY, "metrics_key": METRICS_KEY}
    async with running_fleet(tmp_path, **settings) as fleet:
        gateway = fleet.gateway
        async with gateway.post(CHAT, chat(), authorization="Bearer sk-acme") as answer:
            assert answer.status == 200
        for path in DATA:
            refused = [await status(gateway, path, key) for key in (None, "sk-acme", "sk-umbra", METRICS_KEY + "x")]
            assert refused == [401] * 4
            assert [await status(gateway, path, key) for key in (METRICS_KEY, ADMIN_KEY)] == [200, 200]
        async with gateway.get("/metrics") as answer:
            assert answer.headers["www-authenticate"] == "Bearer"
            said = await answer.text()
        assert "acme" not in said
        assert await named(gateway) == set()
        assert await named(gateway, authorization="Bearer sk-acme") == set()
        assert await named(gateway, authorization=f"Bearer {METRICS_KEY}") == {"a", "b"}
        assert await status(gateway, "/admin/v1/tenants", METRICS_KEY) == 401
        assert await status(gateway, "/v1/models", METRICS_KEY) == 401
        assert [await status(gateway, path) for path in ("/healthz", "/dashboard")] == [200, 200]


async def test_on_loopback_it_is_shown_to_whoever_names_this_machine(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_keys=KEYS) as fleet:
        for path in DATA:
            assert await status(fleet.gateway, path) == 200
            assert await status(fleet.gateway, path, host="llm.example") == 403
        assert await named(fleet.gateway) == {"a", "b"}
        assert await named(fleet.gateway, host="llm.example") == set()


@pytest.mark.parametrize(("host", "access", "expected"), [("127.0.0.1", "key", 401), (EVERYWHERE, "open", 200)])
async def test_an_operator_decides_otherwise(tmp_path: Path, host: str, access: str, expected: int) -> None:
    async with running_fleet(tmp_path, host=host, api_keys=KEYS, operator_access=access) as fleet:
        assert [await status(fleet.gateway, path) for path in DATA] == [expected] * 2


async def test_the_page_asks_for_the_admin_key_once_and_then_shows_the_fleet(tmp_path: Path) -> None:
    chromium()
    async with (
        running_fleet(tmp_path, operator_access="key", api_keys=KEYS, admin_key=ADMIN_KEY) as fleet,
        browsing() as page,
    ):
        await page.goto(f"{fleet.gateway.url}/dashboard")
        await page.until("document.getElementById('login').open")
        await page.press("Escape")
        await page.says("sign in with the admin key")
        await page.until("performance.getEntriesByName(location.origin + '/dashboard/fleet').length > 2")
        assert not await page.eval("document.getElementById('login').open"), "it was closed, and stays so"
        await page.eval("document.getElementById('sign').click()")
        await page.type(ADMIN_KEY)
        await page.press("Enter")
        await page.says("Requests a second")
        await page.until("document.getElementById('banner').hidden")
