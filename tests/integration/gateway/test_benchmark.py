"""``kvgate bench gateway`` runs, measures our gateway, and says of what it could not run why."""

import json
import subprocess
import sys

from tests.support.command import typed

CORPORA = {"200b", "16k", "128k", "16k_hot", "16k_cold", "16k_shared"}
METRICS = {
    *(f"cpu_us_{each}" for each in CORPORA),
    *(f"hotspot_{each}" for each in (*CORPORA, "turns")),
    *(f"affinity_{each}" for each in ("200b", "16k", "128k", "16k_hot", "turns")),
    "cpu_us_per_chunk",
    "added_p50_us",
    "added_p99_us",
    "rss_mib",
}


def test_it_prints_one_object_with_every_figure() -> None:
    done = subprocess.run(
        [*(sys.executable, "-m", "kvgate", "bench", "gateway"), "--quick", "--json", "--peer", "broken=false {port}"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["bench"] == "gateway"
    assert said["metrics"].keys() == METRICS
    assert [name for name in METRICS - {"added_p50_us", "added_p99_us"} if not said["metrics"][name] > 0] == []
    assert 1 <= said["metrics"]["hotspot_16k_cold"] < 2
    assert said["metrics"]["affinity_turns"] > 0.5
    assert "ended with 1" in said["not_run"]["broken"]
    assert said["setup"][0]["backend"] == "nginx" or "nginx" in said["not_run"]


def test_a_peer_without_a_port_is_refused() -> None:
    done = typed("bench", "gateway", "--peer", "smg=smg launch")
    assert done.code == 1
    assert "{port}" in done.err
