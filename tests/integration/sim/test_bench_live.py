"""``kvgate bench live`` serves a few requests with the real gateway and two simulated engines, and leaves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

LIMIT_S = 240.0


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations that take turns; each turn has the blocks of those before it."""
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for number in range(8):
            ids = [0, *(100 * (number % 2) + place for place in range(1, 3 + number // 2))]
            line = {
                "timestamp": 500 * number,
                "input_length": 512 * len(ids) + 200,  # the chat template ends in it, not in a block that is shared
                "output_length": 3,
                "hash_ids": [*ids, 1000 + number],
            }
            file.write(json.dumps(line) + "\n")
    return path


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return what runs with this folder for temporary files."""
    found = []
    for each in psutil.process_iter():
        try:
            if each.environ().get("TMPDIR") == str(folder):
                found.append(each)
        except psutil.Error:
            continue  # another user's, or one that just ended
    return found


@pytest.mark.timeout(LIMIT_S + 30)
def test_both_sides_serve_the_same_requests_and_find_the_same(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "kvgate", "bench", "live", "--trace", str(trace), "--routing", "round_robin"]
    command += ["--instances", "2", "--of", "2", "--every", "1", "--requests", "7", "--stretch", "2", "--json"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    said = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    assert report["metrics"]["requests_count"] == 7
    name = next(name for name in report if name.startswith("the whole fleet, 7 requests in "))
    rows = {row["figure"]: row for row in report[name]}
    assert rows["answered_requests"]["live"] == rows["answered_requests"]["simulated"] == 7
    assert rows["hit_ratio"]["live"] == rows["hit_ratio"]["simulated"] > 0.5
    assert rows["ttft_p99_s"]["live"] > rows["ttft_p50_s"]["simulated"] > 0
    for figure in ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "tpot_mean_s"):
        assert rows[figure]["live"] > 0
        assert rows[figure]["simulated"] > 0
    assert rows["ttft_mean_at_engines_s"]["live"] >= 0.99 * rows["ttft_mean_at_engines_s"]["simulated"]
    meanwhile = {row["whose"]: row["core_pct"] for row in report["processor time meanwhile"]}
    assert min(meanwhile["the gateway's"], meanwhile["the engines'"], meanwhile["the client's"]) > 0
    assert processes_in(folder) == []
    assert list(folder.glob("kvgate-live-*")) == []
