"""The benchmark of steps times both engines with the same work."""

from pathlib import Path

import pytest

from lab.bench.engine.steps import StepsPlan, run

pytestmark = pytest.mark.engine


def test_decode_steps_and_first_tokens_are_timed_for_both_engines(tiny_llama: Path) -> None:
    report = run(
        StepsPlan(
            model=str(tiny_llama),
            contexts=((40, 200),),
            short_tokens=20,
            hit_tokens=120,
            answer_tokens=30,
            block_tokens=16,
        )
    )
    names = {"decode_2_of_40_to_200_ms", "ttft_20_cold_s", "ttft_120_cached_s"}
    assert report.metrics.keys() == {f"{mode}_{name}" for mode in ("stock", "kvgate") for name in names}
    assert all(value > 0 for value in report.metrics.values())
