"""``kvgate bench served --tiny``: both stacks come up, serve the same trace, and are gone at the end."""

import json
from pathlib import Path

import psutil

from tests.support.processes import running
from tests.support.warm_process import Warm

LIMIT_S = 240.0


def test_ours_and_stock_serve_the_small_trace_and_leave_nothing_behind(
    environment: dict[str, str], tmp_path: Path
) -> None:
    Warm.mine()  # it stays, so it is there before
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    words = ["bench", "served", "--tiny", "--duration", "6", "--limit", "12", "--json"]
    with running(words, tmp_path / "bench.log", environment, warm=2) as bench:
        assert bench.wait(LIMIT_S) == 0, bench.said
    report, _ = json.JSONDecoder().raw_decode(bench.said, bench.said.index("{\n"))
    metrics = report["metrics"]
    assert {
        "ours_over_stock_requests_ratio",
        "ours_itl_p99_ms",
        "stock_itl_p99_ms",
        "device_idle_pct",
    } <= metrics.keys()
    assert metrics["ours_requests_per_s"] > 0
    assert metrics["stock_requests_per_s"] > 0
    (figures,) = (rows for name, rows in report.items() if name.startswith("3 users"))
    by_name = {row["figure"]: row for row in figures}
    assert by_name["requests_failed_count"]["ours"] == by_name["requests_failed_count"]["stock"] == 0
    assert by_name["cached_ratio"]["ours"] > 0
    assert 0 <= metrics["device_idle_pct"] <= 100
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not left
