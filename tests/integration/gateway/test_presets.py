"""Presets over the fleet: what is told at once, what needs a restart, and what happens when an instance refuses."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

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


pytestmark = pytest.mark.asyncio(loop_scope="module")  # one for all that share a gateway


@pytest_asyncio.fixture(loop_scope="module")
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Admin]:
    """Of one gateway for all tests in which nothing is changed."""
    async with running_fleet(tmp_path_factory.mktemp("refusing"), admin_key=ADMIN_KEY) as running:
        yield Admin(running.gateway)


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
async def test_an_unknown_preset_is_refused(refusing: Admin, body: dict[str, str]) -> None:
    assert (await refusing.call("PUT", "/presets/current", body))[0] == 400


OWN = {
    "summary": "our chats",
    "context_tokens": 4096,
    "max_batch_size": 3,
    "max_prefill_tokens": 1024,
    "load_deadline_s": 2,
    "ddr": {"size": "1GiB", "path": "/dev/shm/own", "high_watermark": 0.9, "low_watermark": 0.8, "policy": "s3fifo"},
    "nvme": None,
    "quota": {"guaranteed_share": 0.1, "burst_share": 0.5},
}


async def test_an_own_preset_is_made_applied_changed_and_taken_away(fleet: Fleet, admin: Admin) -> None:
    made = await admin.ok("PUT", "/presets/our-chats", OWN, if_none_match="*")
    assert (made["shipped"], made["version"], made["form"]["not_measured"]) == (False, 1, "all")
    listed = {each["name"]: each["shipped"] for each in (await admin.ok("GET", "/presets"))["data"]}
    assert (listed["our-chats"], listed[NAME]) == (False, True)
    assert (await admin.ok("GET", f"/presets/our-chats/{HARDWARE}"))["hot"]["ddr.policy"] == "s3fifo"
    said = await admin.ok("PUT", "/presets/current", {"name": "our-chats", "hardware": HARDWARE})
    assert said["restart"]["a"]["max_batch_size"]["wanted"] == 3
    engine = fleet.engines["a"]
    assert engine.policies[KIND]["name"] == "s3fifo"
    await admin.ok("PUT", "/tenants/acme", {})
    await eventually(lambda: [each["burst_bytes"] for each in engine.quotas.values()] == [100 * 4096 // 2])
    status, headers, _ = await admin.call("GET", "/presets/our-chats")
    assert status == 200
    wider = OWN | {"quota": {"guaranteed_share": 0.1, "burst_share": 0.75}}
    await admin.ok("PUT", "/presets/our-chats", wider, if_match=headers["etag"])
    await eventually(lambda: [each["burst_bytes"] for each in engine.quotas.values()] == [100 * 4096 * 3 // 4])
    assert (await admin.call("PUT", "/presets/our-chats", OWN, if_match=headers["etag"]))[0] == 412
    status, _, said = await admin.call("DELETE", "/presets/our-chats")
    assert (status, said["error"]["code"]) == (409, "preset_in_use")
    assert (await admin.call("DELETE", "/presets/current"))[0] == 204
    assert (await admin.call("DELETE", "/presets/our-chats"))[0] == 204
    assert (await admin.call("GET", "/presets/our-chats"))[0] == 404
    assert (await admin.call("PUT", "/presets/current", {"name": "our-chats", "hardware": HARDWARE}))[0] == 400
    actions = [(each["action"], each["target"]) for each in (await admin.ok("GET", "/audit"))["data"]]
    assert actions.count(("put", "presets/our-chats")) == 2
    assert ("delete", "presets/our-chats") in actions


async def test_what_comes_along_is_shown_as_it_is_written_and_stays(admin: Admin) -> None:
    shown = await admin.ok("GET", f"/presets/{NAME}")
    assert shown["shipped"]
    copied = await admin.ok("PUT", "/presets/copy", shown["form"])
    assert copied["form"] == shown["form"]
    for method, body in (("PUT", OWN), ("DELETE", None)):
        status, _, said = await admin.call(method, f"/presets/{NAME}", body)
        assert (status, said["error"]["code"]) == (409, "preset_shipped")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context_tokens": 0}, "context_tokens is 0; it must be a whole number from 1"),
        ({"nonsense": 1}, "nonsense is not a known key"),
        ({"summary": ""}, "summary is ''; it must be text"),
        ({"ddr": {}}, "ddr.size is missing"),
        ({"ddr": OWN["ddr"] | {"policy": "best"}}, "ddr.policy is 'best'; allowed: "),  # type: ignore[operator]
        ({"quota": {"guaranteed_share": 0.6, "burst_share": 0.5}}, "must not be above burst_share"),
    ],
)
async def test_a_preset_that_can_not_be_is_refused_with_the_reason(
    refusing: Admin, changes: dict[str, object], said: str
) -> None:
    status, _, answer = await refusing.call("PUT", "/presets/wrong", OWN | changes)
    assert (status, answer["error"]["code"]) == (400, "invalid_preset")
    assert said in answer["error"]["message"]
    assert (await refusing.call("GET", "/presets/wrong"))[0] == 404
