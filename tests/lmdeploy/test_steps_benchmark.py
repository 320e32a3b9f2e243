"""The benchmark of steps times both engines with the same work."""

import json
from pathlib import Path

import pytest

from lab.bench.engine.steps import MODES
from tests.support.own_process import ran

pytestmark = pytest.mark.engine

_RUN = """
import json
from lab.bench.engine.steps import StepsPlan, run
plan = StepsPlan(
    model={model!r},
    contexts=((40, 200),),
    short_tokens=20,
    hit_tokens=120,
    answer_tokens=30,
    block_tokens=16,
)
print(json.dumps(dict(run(plan).metrics)))
"""


def test_decode_steps_and_first_tokens_are_timed_for_both_engines(tiny_llama: Path) -> None:
    said = ran(_RUN.format(model=str(tiny_llama)), spares=len(MODES))
    metrics = json.loads(said.splitlines()[-1])
    names = {"decode_2_of_40_to_200_ms", "ttft_20_cold_s", "ttft_120_cached_s"}
    assert metrics.keys() == {f"{mode}_{name}" for mode in ("stock", "kvgate") for name in names}
    assert all(value > 0 for value in metrics.values())
