"""``kvgate up`` with a preset and tiers: each engine has its own, of the sizes that were asked for."""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvgate.ports import free_ports
from tests.support.processes import eventually, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MIB = 1 << 20


KEYS = ("--api-key", "acme:k-acme", "--api-key", "umbra:k-umbra")


def read(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - an engine of this test
        told: dict[str, Any] = json.load(answer)
    return told


def saved_tenants(url: str) -> set[str]:
    return {block["tenant"] for block in read(f"{url}/kv/v1/blocks")["blocks"]}


def ask(gateway: str, key: str) -> None:
    body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "a " * 200}], "max_tokens": 2}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{gateway}/v1/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - a gateway of this test
        assert answer.status == 200


def test_each_engine_has_the_tiers_that_preset_and_options_ask_for(environment: dict[str, str], tmp_path: Path) -> None:
    port = str(free_ports(1)[0])
    asked = ("--preset", "long-context-64k", "--hardware", "cpu", "--ddr", "8MiB", "--nvme", "16MiB")
    places = ("--ddr-path", str(tmp_path / "ddr"), "--nvme-dir", str(tmp_path / "nvme"))
    with running(
        ["up", "--tiny", "--device", "cpu", "--port", port, *asked, *places, *KEYS], tmp_path / "up.log", environment
    ) as up:
        up.until_said("Ctrl-C stops everything")
        assert "Preset long-context-64k on cpu" in up.said
        assert "not applied" not in up.said
        urls = dict(re.findall(r"(engine-\d) +(http://\S+)   tiers: DDR 8 MiB", up.said))
        assert set(urls) == {"engine-0", "engine-1"}
        for url in urls.values():
            tiers = read(f"{url}/kv/v1/stats")["tiers"]
            sizes = {name: tiers[name]["capacity_blocks"] * tiers[name]["block_bytes"] for name in ("DDR", "NVME")}
            block = tiers["DDR"]["block_bytes"]
            assert 8 * MIB - block < sizes["DDR"] <= 8 * MIB
            assert 16 * MIB - block < sizes["NVME"] <= 16 * MIB
        ask(f"http://127.0.0.1:{port}", "k-acme")
        eventually(lambda: any(map(saved_tenants, urls.values())), 60, "a saved block")
        tenants = set().union(*map(saved_tenants, urls.values()))
        assert len(tenants) == 1
        for url in urls.values():
            for tier, share in (("DDR", 8 * MIB), ("NVME", 16 * MIB)):
                accounts = read(f"{url}/kv/v1/quotas")["tiers"][tier]
                guaranteed = {name: each["quota"] for name, each in accounts.items() if name != "shared"}
                assert len(guaranteed) == 2
                assert tenants < set(guaranteed), "who has a key is who its requests are accounted to"
                for quota in guaranteed.values():
                    assert quota["guaranteed_bytes"] == pytest.approx(0.1 * share, abs=block)
                    assert quota["burst_bytes"] == pytest.approx(0.6 * share, abs=block)
    assert {path.name for path in tmp_path.iterdir()} >= {"ddr-0", "ddr-1", "nvme"}
    assert {path.name for path in (tmp_path / "nvme").iterdir()} == {"engine-0", "engine-1"}
    assert 8 * MIB <= (tmp_path / "ddr-0").stat().st_size < 16 * MIB
