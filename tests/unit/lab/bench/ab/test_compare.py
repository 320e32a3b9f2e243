"""A difference counts only beyond what the draw of requests explains."""

from random import Random

import pytest

from lab.bench.ab.compare import SEGMENTS, Change, Verdict, compare
from lab.simulate.outcome import Served


def served(found: list[int], *, ttft_s: float = 1.0) -> list[Served]:
    return [
        Served(number=number, copy=0, ttft_s=ttft_s, prompt_tokens=100, found_tokens=each)
        for number, each in enumerate(found)
    ]


def of(changes: list[Change], figure: str) -> Change:
    return next(each for each in changes if each.figure == figure)


def test_a_side_against_itself_is_a_tie() -> None:
    rng = Random(1)  # noqa: S311 - reproducible, not secret
    side = served([rng.randrange(100) for _ in range(500)])
    for change in compare([(side, side)], seed=0):
        assert (change.verdict, change.change, change.low, change.high) == (Verdict.TIE, 0, 0, 0)


def test_more_tokens_found_and_shorter_times_are_better() -> None:
    rng = Random(1)  # noqa: S311
    found = [rng.randrange(80) for _ in range(500)]
    changes = compare([(served(found), served([each + 9 for each in found], ttft_s=0.5))], seed=0)
    assert {each.verdict for each in changes} == {Verdict.BETTER}
    turned = compare([(served([each + 9 for each in found], ttft_s=0.5), served(found))], seed=0)
    assert {each.verdict for each in turned} == {Verdict.WORSE}
    assert of(changes, "ttft_mean_s").change == pytest.approx(-0.5)
    assert of(changes, "found_ratio").low < of(changes, "found_ratio").change < of(changes, "found_ratio").high


def test_gains_and_losses_that_come_in_runs_of_requests_are_no_proof() -> None:
    rng = Random(2)  # noqa: S311
    size = 20
    shifts = [rng.choice((-20, 20)) for _ in range(SEGMENTS)]
    a = served([50] * size * SEGMENTS)
    b = served([50 + shift for shift in shifts for _ in range(size)])
    assert of(compare([(a, b)], seed=0), "found_ratio").verdict is Verdict.TIE


def test_only_requests_that_both_sides_answered_are_compared() -> None:
    a, b = served([10] * 100), served([10] * 100)[:60]
    changes = compare([([*a, a[0]._replace(copy=1, found_tokens=99)], b)], seed=0)
    assert of(changes, "found_ratio").verdict is Verdict.TIE
    with pytest.raises(ValueError, match="no answered request in common"):
        compare([(a[:50], a[50:])], seed=0)


def test_the_same_seed_draws_the_same_interval() -> None:
    rng = Random(3)  # noqa: S311
    a, b = (served([rng.randrange(100) for _ in range(300)]) for _ in range(2))
    assert compare([(a, b)], seed=4) == compare([(a, b)], seed=4)
