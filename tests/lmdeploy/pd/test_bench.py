"""``kvgate bench pd``: it runs on real engines and says what it promises; how much separation brings is no test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def test_both_ways_are_measured_in_one_run(tiny_llama: Path) -> None:
    done = subprocess.run(
        [*(sys.executable, "-m", "kvgate", "bench", "pd", "--json", "--model", str(tiny_llama)), *("--rounds", "1")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bench"] == "pd"
    for name in ("hybrid", "separated"):
        assert report["metrics"][f"{name}_itl_samples"] > 20
        assert report["metrics"][f"{name}_itl_p99_ms"] >= report["metrics"][f"{name}_itl_p50_ms"] > 0
        assert report["metrics"][f"{name}_long_ttft_p50_ms"] > 0
    assert report["metrics"]["itl_p99_improvement_ratio"] > 0
