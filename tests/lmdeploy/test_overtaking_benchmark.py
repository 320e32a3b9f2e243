"""The benchmark of overtaking gives the first tokens of both ways, and the same answers."""

import json
from pathlib import Path

import pytest

from tests.support.own_process import ran

pytestmark = pytest.mark.engine

_RUN = """
import json
from lab.bench.engine.overtaking import OvertakingPlan, run
plan = OvertakingPlan(
    model={model!r},
    long_tokens=900,
    context_tokens=300,
    new_tokens=100,
    chunk_tokens=64,
    block_tokens=16,
    rounds=1,
)
print(json.dumps(json.loads(run(plan).as_json())))
"""


def test_both_ways_are_timed_and_answer_alike(tiny_llama: Path) -> None:
    found = json.loads(ran(_RUN.format(model=str(tiny_llama)), spares=1).splitlines()[-1])
    assert found["metrics"]["equal_tokens_ratio"] == 1.0
    assert [row["turn"] for row in found["first_tokens"]] == ["one after the other", "overtaking"]
    assert all(value > 0 for value in found["metrics"].values())
