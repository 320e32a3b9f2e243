"""``kvgate plan --check`` runs what it chose: the real gateway, a simulated engine, and a few seconds of a trace."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 240.0


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for number in range(16):
            ids = [number % 4, *(100 * (number % 4) + place for place in range(1, 3 + number // 4))]
            line = {
                "timestamp": 500 * (number // 2),
                "input_length": 512 * len(ids),
                "output_length": 4,
                "hash_ids": ids,
            }
            file.write(json.dumps(line) + "\n")
    return path


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_plan_is_held_to_a_live_run_of_its_fleet(trace: Path) -> None:
    command = [sys.executable, "-m", "kvgate", "plan", str(trace), "--slo", "ttft_p90=10s", "--ddr", "0"]
    command += ["--check", "--check-seconds", "10", "--json"]
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
    )
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    metrics = report["metrics"]
    assert metrics["instances_count"] == metrics["check_fleet_instances_count"] == metrics["check_instances_count"] == 1
    assert metrics["check_requests_count"] == 16
    name = next(name for name in report if name.startswith("check: "))
    rows = {row["figure"]: row for row in report[name]}
    assert rows["answered_requests"]["live"] == rows["answered_requests"]["predicted"] == 16
    assert rows["ttft_mean_s"]["live"] >= rows["ttft_mean_at_engines_s"]["live"] > 0
    assert rows["hit_ratio"]["predicted"] > 0
    goals = {row["goal"]: row for row in report["goals, live"]}
    assert (goals["answered_ratio"]["live"], goals["answered_ratio"]["met"]) == (1.0, "yes")
    assert goals["ttft_p90_s"]["met"] == ("yes" if goals["ttft_p90_s"]["live"] <= 10 else "no")
    assert "check, live: " in said.stderr
