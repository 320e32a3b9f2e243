"""Gateways whose clocks are wrong: what is stored, and which keys are good, go by the store's clock."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.gateway.test_process import listening, start
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.databases import postgres
from tests.support.fleet import CHAT, chat, instances, running_fleet
from tests.support.running_gateway import GatewayClient, eventually
from tests.support.scripted_engine import MODEL, ScriptedEngine
from tests.support.skewed import skewed

SECRET = "the same secret everywhere"  # noqa: S105 - of no one
DAY_S = 86_400
PIN = {"model": MODEL, "prompt": list(range(64)), "ttl_s": 3600}


@asynccontextmanager
async def wrong_gateway(
    folder: Path, store_url: str, engines: dict[str, ScriptedEngine], skew_s: float
) -> AsyncIterator[GatewayClient]:
    """Run a gateway process whose clock is ahead by so much."""
    named = ",".join(f'{{"id": "{each["id"]}", "url": "{each["url"]}"}}' for each in instances(engines))
    process = await start(
        folder,
        KVGATE_INSTANCES=f"[{named}]",
        KVGATE_STORE_URL=store_url,
        KVGATE_SALT_SECRET=SECRET,
        KVGATE_ADMIN_KEY=ADMIN_KEY,
        KVGATE_STORE_POLL_S="0.05",
        KVGATE_HEALTH_INTERVAL_S="0.05",
        **skewed(skew_s),
    )
    try:
        url = await listening(process)
        assert process.stderr is not None
        drained = asyncio.create_task(process.stderr.read())
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            gateway = GatewayClient(url, session)

            async def up() -> bool:
                try:
                    async with gateway.get("/readyz") as answer:
                        return bool(answer.status == 200)
                except aiohttp.ClientError:
                    return False

            await eventually(up, 60.0)
            yield gateway
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0
        await drained
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def status_with(gateway: GatewayClient, key: str) -> int:
    async with gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        await answer.read()
        return int(answer.status)


@pytest.mark.parametrize(
    ("skew_s", "said"), [(400 * DAY_S, "34560000 s ahead of"), (-400 * DAY_S, "34560000 s behind")]
)
async def test_keys_expire_by_the_stores_clock_and_a_clock_that_differs_is_a_problem(
    tmp_path: Path, skew_s: float, said: str
) -> None:
    with postgres() as store_url:
        shared: dict[str, Any] = {
            "store_url": store_url,
            "salt_secret": SECRET,
            "admin_key": ADMIN_KEY,
            "store_poll_s": 0.05,
        }
        async with running_fleet(tmp_path / "right", **shared) as fleet:
            right = Admin(fleet.gateway)
            await right.ok("PUT", "/tenants/acme", {})
            for _ in range(20):
                await right.ok("PUT", "/quotas/acme", {"requests_per_min": 1000})
            good = (await right.ok("POST", "/keys", {"tenant": "acme", "expires_in_s": 3600}))["key"]
            short = (await right.ok("POST", "/keys", {"tenant": "acme", "expires_in_s": 0.001}))["key"]
            async with wrong_gateway(tmp_path / "wrong", store_url, fleet.engines, skew_s) as gateway:
                wrong = Admin(gateway)
                assert await status_with(gateway, good) == 200
                assert await status_with(gateway, short) == 401
                for admin in (right, wrong):
                    pin = await admin.ok("POST", "/prefixes", PIN)
                    assert 0 < pin["left_s"] <= 3600
                    [shown] = (await admin.ok("GET", "/prefixes"))["data"]
                    assert 0 < shown["left_s"] <= 3600
                made = await wrong.ok("POST", "/keys", {"tenant": "acme", "expires_in_s": 3600})

                async def known() -> bool:
                    return await status_with(fleet.gateway, made["key"]) == 200

                await eventually(known)
                assert len((await right.ok("GET", "/audit"))["data"]) == 26
                problems = (await wrong.ok("GET", "/status"))["problems"]
                assert [each["kind"] for each in problems] == ["clock"]
                assert said in problems[0]["message"]
                assert (await right.ok("GET", "/status"))["problems"] == []
