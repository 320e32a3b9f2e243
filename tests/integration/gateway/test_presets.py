"""Presets over the fleet: what is told at once, what needs a restart, and what happens when an instance refuses."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvcontrol.core import CacheTier
from kvcontrol.core.control import TierStats
from kvcontrol.presets import Presets
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import Fleet, running_fleet
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import ScriptedEngine

NAME, HARDWARE = "long-context-32k", "cpu"
PRESET = Presets.shipped().preset(NAME, HARDWARE)
KIND = "eviction:ddr"
BODY = {"name": NAME, "hardware": HARDWARE}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    for engine in engines.values():
        engine.policies[KIND] = {"kind": KIND, "name": "fifo", "params": {}}
        engine.tiers[CacheTier.DDR] = TierStats(capacity_blocks=100, used_blocks=0, cached_blocks=0, block_bytes=4096)
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY) as running:
        yield running


@pytest.fixture
def admin(fleet: Fleet) -> Admin:
    return Admin(fleet.gateway)


async def test_presets_are_listed_and_say_what_is_hot(admin: Admin) -> None:
    listed = await admin.ok("GET", "/presets")
    assert NAME in [each["name"] for each in listed["data"]]
    assert HARDWARE in listed["hardware"]
    shown = await admin.ok("GET", f"/presets/{NAME}/{HARDWARE}")
    assert shown["hot"]["ddr.policy"] == PRESET.ddr.policy
    assert shown["at_start"]["block_tokens"] == PRESET.block_tokens
    assert (await admin.call("GET", f"/presets/{NAME}/abacus"))[0] == 404
    assert (await admin.call("GET", "/presets/current"))[0] == 404


async def test_applying_one_swaps_the_policy_tells_shares_and_names_what_needs_a_restart(
    fleet: Fleet, admin: Admin
) -> None:
    await admin.ok("PUT", "/tenants/acme", {})
    await admin.ok("PUT", "/tenants/other", {})
    await admin.ok("PUT", "/quotas/other", {"kv": {"DDR": {"burst_bytes": 777}}})
    said = await admin.ok("PUT", "/presets/current", BODY)
    engine = fleet.engines["a"]
    assert engine.policies[KIND]["name"] == PRESET.ddr.policy
    assert said["restart"]["a"]["max_batch_size"] == {"present": 512, "wanted": PRESET.max_batch_size}
    assert said["restart"]["b"]["ddr.size_bytes"]["present"] == 100 * 4096
    await eventually(lambda: len(engine.quotas) == 2)
    assert sorted(each["burst_bytes"] for each in engine.quotas.values()) == [
        777,
        int(100 * 4096 * PRESET.quota.burst_share),
    ]
    assert (await admin.ok("GET", f"/policies/{KIND}"))["name"] == PRESET.ddr.policy
    assert (await admin.call("DELETE", "/presets/current"))[0] == 204
    await eventually(lambda: [each["burst_bytes"] for each in engine.quotas.values()] == [777])


async def test_a_preset_whose_policy_one_refuses_is_not_applied(fleet: Fleet, admin: Admin) -> None:
    fleet.engines["b"].refused_policies.add(PRESET.ddr.policy)
    status, _, said = await admin.call("PUT", "/presets/current", BODY)
    assert (status, said["error"]["code"]) == (409, "policy_refused")
    assert [each.policies[KIND]["name"] for each in fleet.engines.values()] == ["fifo", "fifo"]
    assert (await admin.call("GET", "/presets/current"))[0] == 404


async def test_instances_without_policies_keep_what_they_have(fleet: Fleet, admin: Admin) -> None:
    for engine in fleet.engines.values():
        engine.policy_status = 404
    await admin.ok("PUT", "/presets/current", BODY)
    assert not any(engine.told for engine in fleet.engines.values())


@pytest.mark.parametrize("body", [{"name": "nothing", "hardware": HARDWARE}, {"name": NAME, "hardware": "abacus"}, {}])
async def test_an_unknown_preset_is_refused(admin: Admin, body: dict[str, str]) -> None:
    assert (await admin.call("PUT", "/presets/current", body))[0] == 400
