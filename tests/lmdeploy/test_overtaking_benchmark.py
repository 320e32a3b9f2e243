"""The benchmark of overtaking gives the first tokens of both ways, and the same answers."""

import json
from pathlib import Path

import pytest

from lab.bench.engine.overtaking import OvertakingPlan, run

pytestmark = pytest.mark.engine


def test_both_ways_are_timed_and_answer_alike(tiny_llama: Path) -> None:
    report = run(
        OvertakingPlan(
            model=str(tiny_llama),
            long_tokens=900,
            context_tokens=300,
            new_tokens=100,
            chunk_tokens=64,
            block_tokens=16,
            rounds=1,
        )
    )
    assert report.metrics["equal_tokens_ratio"] == 1.0
    found = json.loads(report.as_json())
    assert [row["turn"] for row in found["first_tokens"]] == ["one after the other", "overtaking"]
    assert all(value > 0 for value in found["metrics"].values())
