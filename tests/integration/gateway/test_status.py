"""What the status page is made of: its files, what everybody sees, and ``/admin/v1/status``."""

import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.dashboard import Assets
from kvcontrol.core import CacheTier
from kvcontrol.core.control import TierStats
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, Fleet, chat, running_fleet
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import MODEL, ScriptedEngine

STATIC = Path(__file__).parents[3] / "gateway" / "dashboard" / "static"
KEYS = [{"key": "sk-acme", "tenant": "acme"}]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    engine = ScriptedEngine()
    engine.tiers = {CacheTier.HBM: TierStats(capacity_blocks=100, used_blocks=60, cached_blocks=40, block_bytes=4096)}
    async with running_fleet(tmp_path, {"a": engine}, admin_key=ADMIN_KEY, api_keys=KEYS) as running:
        yield running


async def test_the_page_lets_nothing_in_but_its_own_files(fleet: Fleet) -> None:
    async with fleet.gateway.get("/dashboard") as answer:
        page = await answer.text()
        assert answer.content_type == "text/html"
        policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert " style=" not in page
    for script in re.findall(r"<script[^>]*>", page):
        assert 'src="/dashboard/' in script
    for address in re.findall(r'(?:src|href)="([^"]+)"', page):
        if address.startswith("/dashboard/"):
            async with fleet.gateway.get(address) as answer:
                assert answer.status == 200, address
                etag = answer.headers["etag"]
            async with fleet.gateway.get(address, **{"if-none-match": etag}) as answer:
                assert answer.status == 304, address
        else:
            assert address[0] == "#" or address == "/metrics", f"{address} leads out of the page"


@pytest.mark.parametrize("name", ["nothing.js", "../dashboard.py", "%2e%2e/%2e%2e/app.py", "vendor/uplot/README.md"])
async def test_what_is_no_file_of_the_page_is_not_there(fleet: Fleet, name: str) -> None:
    async with fleet.gateway.get(f"/dashboard/{name}") as answer:
        assert answer.status == 404


def test_every_import_of_a_script_is_a_file_of_the_page() -> None:
    files = Assets().files
    for name, asset in files.items():
        for imported in re.findall(r'from "/dashboard/([^"]+)"', asset.body.decode()):
            assert imported in files, f"{name} imports {imported}"


def test_the_chart_library_is_the_published_one() -> None:
    folder = STATIC / "vendor" / "uplot"
    sums = dict(re.findall(r"^    ([0-9a-f]{64})  (\S+)$", (folder / "README.md").read_text(), re.MULTILINE))
    assert {each: hashlib.sha256((folder / each).read_bytes()).hexdigest() for each in sums.values()} == {
        name: digest for digest, name in sums.items()
    }
    assert {each.name for each in folder.iterdir()} == {*sums.values(), "README.md"}


async def test_without_the_admin_key_there_is_the_fleet_and_nothing_more(fleet: Fleet) -> None:
    async with fleet.gateway.get("/dashboard/fleet") as answer:
        assert answer.status == 200
        said = await answer.json()
    assert set(said) == {"policy", "usable", "outcomes", "instances"}
    assert (said["usable"], said["instances"][0]["state"], said["instances"][0]["models"]) == (1, "healthy", [MODEL])
    assert "tiers" not in said["instances"][0]
    for key in (None, "sk-acme"):
        status, _, refused = await Admin(fleet.gateway, key).call("GET", "/status")
        assert status == 401, refused


async def test_the_status_has_tiers_tenants_and_the_traffic_of_the_last_minutes(fleet: Fleet) -> None:
    admin = Admin(fleet.gateway)
    await admin.ok("PUT", "/quotas/acme", {"requests_per_min": 5, "concurrency": 3})
    key = {"authorization": "Bearer sk-acme"}
    for stream in (True, False):
        async with fleet.gateway.post(CHAT, chat(stream=stream), **key) as answer:
            await answer.read()
            assert answer.status == 200

    async def told() -> bool:
        said = await admin.ok("GET", "/status")
        return sum(each["outcomes"].get("ok", 0) for each in said["intervals"]) == 2

    await eventually(told)
    said = await admin.ok("GET", "/status")
    (instance,) = said["instances"]
    assert instance["tiers"] == {
        "HBM": {"capacity_blocks": 100, "used_blocks": 60, "cached_blocks": 40, "block_bytes": 4096}
    }
    assert (instance["device"], instance["running"], instance["breaker"]) == ("cpu", 0, "closed")
    (tenant,) = said["tenants"]
    assert (tenant["tenant"], tenant["requests_per_min"], tenant["tokens_per_min"]) == ("acme", 5, None)
    assert (tenant["usage"]["requests"], tenant["usage"]["running"]) == (2, 0)
    busy = [each for each in said["intervals"] if each["ttft_p50_s"] is not None]
    assert busy[0]["ttft_p50_s"] > 0, "of the stream"
    assert sum(each["prompt_tokens"] for each in said["intervals"]) == 14
    last = said["intervals"][-1]["number"]
    newer = await admin.ok("GET", f"/status?after={last}&process={said['process']}")
    assert all(each["number"] > last for each in newer["intervals"])
    again = await admin.ok("GET", f"/status?after={last}&process=another")
    assert again["intervals"][0]["number"] == 1, "another process' number leads to all of them"


async def test_a_suspended_tenant_is_shown_as_such_and_policies_with_what_there_is_to_choose(fleet: Fleet) -> None:
    admin = Admin(fleet.gateway)
    await admin.ok("PUT", "/tenants/acme", {"suspended": True})
    assert (await admin.ok("GET", "/status"))["tenants"][0]["suspended"] is True
    fleet.engines["a"].available = {"lru": "the one that was used longest ago"}
    assert (await admin.ok("GET", "/policies"))["instances"]["a"]["available"] == fleet.engines["a"].available
