"""Lifetimes are read in order, learnt when they have ended, and judged as the definitions say."""

import math
import random
from array import array
from itertools import pairwise

import pytest

from lab.bench.prediction.kendall import kendall_tau
from lab.bench.prediction.lifetimes import NEVER_S, Lifetime, answers, known_in_order, returns
from lab.bench.prediction.prefetching import announced, speculative
from lab.bench.prediction.scores import score
from lab.research.lifetimes.calibration import CalibratedPredictor
from lab.research.lifetimes.lifetime import LifetimeFeatures
from lab.research.lifetimes.table import ConstantEstimator, TableEstimator
from lab.traces import Request


def request(*ids: int, at_s: float, answer: int = 10) -> Request:
    return Request(
        block_ids=array("q", ids), block_tokens=10, prompt_tokens=10 * len(ids), at_s=at_s, output_tokens=answer
    )


def test_a_chats_past_and_what_is_new_are_known() -> None:
    chat = [request(0, 1, at_s=0, answer=5), request(0, 9, at_s=1), request(0, 1, 2, at_s=9, answer=7)]
    first, stranger, second = answers(chat)
    assert first.features == LifetimeFeatures(prompt_tokens=20)
    assert stranger.features.past == ()
    assert second.features == LifetimeFeatures(prompt_tokens=30, new_tokens=10, past=(5.0,))
    assert [each.lifetime for each in (first, stranger, second)] == [5, 10, 7]


def test_a_return_is_the_time_to_the_chats_next_request_and_what_nobody_can_know_is_left_out() -> None:
    chat = [request(0, 1, at_s=0), request(0, 1, 2, at_s=50), request(0, 9, at_s=NEVER_S + 100)]
    found = returns(chat)
    assert [each.lifetime for each in found] == [50, NEVER_S]
    assert found[1].features.past == (50.0,)


def test_a_lifetime_is_learnt_from_once_it_has_ended() -> None:
    lives = [
        Lifetime(began_s=began, known_at_s=began + lasts, features=LifetimeFeatures(prompt_tokens=1), lifetime=lasts)
        for began, lasts in ((0, 5), (1, 1), (2, 100), (6, 1))
    ]
    known = [ended for _, ended in known_in_order(lives)]
    assert known == [[], [], [lives[1]], [lives[0]]]


def naive_tau(first: list[float], second: list[float]) -> float:
    signs = [
        ((a > c) - (a < c), (b > d) - (b < d))
        for place, (a, b) in enumerate(zip(first, second, strict=True))
        for c, d in list(zip(first, second, strict=True))[place + 1 :]
    ]
    apart = math.sqrt(sum(abs(x) for x, _ in signs) * sum(abs(y) for _, y in signs))
    return sum(x * y for x, y in signs) / apart if apart else 0.0


def test_kendalls_tau_is_what_counting_pairs_gives() -> None:
    rng = random.Random(1)  # noqa: S311 - reproducible, not secret
    for size in (0, 1, 2, 30, 57):
        first = [float(rng.randrange(8)) for _ in range(size)]
        second = [float(rng.randrange(5)) + first[place] / 9 for place in range(size)]
        assert kendall_tau(first, second) == pytest.approx(naive_tau(first, second))
    assert kendall_tau([1, 2, 3], [7, 8, 9]) == 1
    assert kendall_tau([1, 2, 3], [9, 8, 7]) == -1
    with pytest.raises(ValueError, match="as many"):
        kendall_tau([1], [])


def drawn(number: int) -> list[Lifetime]:
    rng = random.Random(5)  # noqa: S311 - reproducible, not secret
    lives = []
    for place in range(number):
        prompt = rng.choice([100, 400, 1_600, 6_400])
        lifetime = prompt / 4 * math.exp(rng.gauss(0, 0.2))
        lives.append(
            Lifetime(
                began_s=place,
                known_at_s=place + 1,
                features=LifetimeFeatures(prompt_tokens=prompt),
                lifetime=lifetime,
            )
        )
    return lives


def test_what_can_be_known_is_found_and_judged() -> None:
    lives = drawn(2_000)
    constant = score(CalibratedPredictor(ConstantEstimator()), lives, later_age=50)
    table = score(CalibratedPredictor(TableEstimator()), lives, later_age=50)
    assert abs(constant.mae_gain) < 0.05
    assert table.constant_mae == constant.constant_mae
    assert table.mae_gain > 0.7
    assert table.kendall_tau > 0.7
    assert table.p90_covers == pytest.approx(0.9, abs=0.04)
    assert table.calibration_error < 0.1
    assert table.usable_within_quarter > 0.6
    assert table.later_mae < table.later_constant_mae


def test_too_few_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="too few"):
        score(CalibratedPredictor(ConstantEstimator()), drawn(12), later_age=1)


def test_what_is_announced_is_used_and_guesses_are_counted_as_what_they_are() -> None:
    chats = [request(0, chat, 10 + chat, at_s=5.0 * turn * 8 + 5 * chat) for turn in range(60) for chat in range(8)]
    assert all(before.at_s < after.at_s for before, after in pairwise(chats))
    known = announced(chats, capacity_blocks=12, queue=2)
    assert known.precision == 1
    assert known.recall > 0.95
    guessed = speculative(chats, capacity_blocks=12, least_probability=0.3, every_s=5, horizon_s=6)
    assert guessed.prefetched_blocks == guessed.used_blocks + guessed.wasted_blocks
    assert guessed.precision > 0.5
    none = speculative(chats, capacity_blocks=12, least_probability=1)
    assert none.precision == none.recall == 0
