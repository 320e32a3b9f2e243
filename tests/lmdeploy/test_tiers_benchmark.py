"""The benchmark of the tiers does real work with each kind of engine."""

from pathlib import Path

import pytest

from lab.bench.engine.tiers import Plan, run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_every_mode_restores_what_stock_computes_again(tiny_llama: Path) -> None:
    plan = Plan(
        model=str(tiny_llama),
        contexts=4,
        context_tokens=512,
        long_tokens=1024,
        rounds=2,
        kv_blocks=110,
        block_size=16,
        max_batch_size=8,
        ddr_bytes=64 << 20,
        nvme_bytes=64 << 20,
        nvme_path="",
        seed=1,
        pause_s=0.1,
        piecewise_tokens=0,
        decode_tokens=60,
        first_id=5,
        last_id=999,
    )
    metrics = run(plan, ("stock", "ddr", "nvme"))
    for mode in ("ddr", "nvme"):
        assert metrics[f"{mode}_restored_equal_ratio"] == 1.0
        assert metrics[f"{mode}_long_restored_equal_ratio"] == 1.0
        assert metrics[f"{mode}_failed_loads"] == 0
    assert metrics["stock_revisit_ttft_s"] > 0
    assert metrics["ddr_revisit_speedup_ratio"] > 0
