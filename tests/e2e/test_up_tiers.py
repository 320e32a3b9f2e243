"""``kvgate up`` with a preset and tiers: each engine has its own, of the sizes that were asked for."""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvgate.ports import free_ports
from tests.support.processes import running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MIB = 1 << 20


def stats(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/kv/v1/stats", timeout=60) as answer:  # noqa: S310 - an engine of this test
        told: dict[str, Any] = json.load(answer)
    return told


def test_each_engine_has_the_tiers_that_preset_and_options_ask_for(environment: dict[str, str], tmp_path: Path) -> None:
    port = str(free_ports(1)[0])
    asked = ("--preset", "long-context-64k", "--hardware", "cpu", "--ddr", "8MiB", "--nvme", "16MiB")
    places = ("--ddr-path", str(tmp_path / "ddr"), "--nvme-dir", str(tmp_path / "nvme"))
    with running(
        ["up", "--tiny", "--device", "cpu", "--port", port, *asked, *places], tmp_path / "up.log", environment
    ) as up:
        up.until_said("Ctrl-C stops everything")
        assert "Preset long-context-64k on cpu" in up.said
        urls = dict(re.findall(r"(engine-\d) +(http://\S+)   tiers: DDR 8 MiB", up.said))
        assert set(urls) == {"engine-0", "engine-1"}
        for url in urls.values():
            tiers = stats(url)["tiers"]
            sizes = {name: tiers[name]["capacity_blocks"] * tiers[name]["block_bytes"] for name in ("DDR", "NVME")}
            block = tiers["DDR"]["block_bytes"]
            assert 8 * MIB - block < sizes["DDR"] <= 8 * MIB
            assert 16 * MIB - block < sizes["NVME"] <= 16 * MIB
    assert {path.name for path in tmp_path.iterdir()} >= {"ddr-0", "ddr-1", "nvme"}
    assert {path.name for path in (tmp_path / "nvme").iterdir()} == {"engine-0", "engine-1"}
    assert 8 * MIB <= (tmp_path / "ddr-0").stat().st_size < 16 * MIB
