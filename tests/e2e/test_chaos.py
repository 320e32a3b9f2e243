"""Gateways, workers, PostgreSQL, Redis and engines are killed, stopped and continued under load; nothing is lost by it.

``KVGATE_TEST_CHAOS_S`` is how long that takes, five minutes by default, and ``KVGATE_TEST_CHAOS_SEED`` what it does.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.models.tiny import build_tiny
from tests.support.chaos import QUOTA, deployed

SECONDS = float(os.environ.get("KVGATE_TEST_CHAOS_S", "300"))
SEED = int(os.environ.get("KVGATE_TEST_CHAOS_SEED", "1"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
async def test_no_revoked_key_is_accepted_no_change_is_lost_and_the_fleet_is_one_at_the_end(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    async with deployed(tmp_path, SEED, build_tiny(tmp_path / "tiny-llama")) as deployment:
        assert (await deployment.admin("PUT", "/tenants/acme", {}))[0] == 200
        assert (await deployment.admin("PUT", "/quotas/acme", QUOTA))[0] == 200
        work = [
            asyncio.create_task(each)
            for each in (
                *(deployment.load("k") for _ in range(4)),
                deployment.change(),
                deployment.swap(),
                deployment.budget(),
                deployment.revoke(),
            )
        ]
        try:
            await deployment.attack(SECONDS)
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        seen = deployment.seen
        record_property("statuses", dict(seen.statuses))
        record_property("attacks", dict(seen.attacks))
        await deployment.healed()
        await deployment.one_fleet()
        status, said = await deployment.admin("GET", "/tenants")
        assert status == 200
        assert isinstance(said, dict)
        names = {each["id"] for each in said["data"]}
        assert seen.made - names == set()
        assert seen.refused & names == set()
        assert seen.late == []
        assert seen.made
        assert seen.statuses.keys() <= {0, 200, 429, 502, 503, 504}
        assert seen.statuses[200] > sum(seen.attacks.values())
