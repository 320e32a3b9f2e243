"""What steps cost, learnt from those that were measured."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.scheduler_ir.pacing import LearntCost, StepCosts
from tests.support.examples import examples


def true_s(tokens: int, history: int) -> float:
    return 0.012 + 24e-6 * tokens + 9e-10 * tokens * (history + tokens / 2) + 1.5e-7 * history


def learnt(*, noise: float = 0.0, slow: frozenset[int] = frozenset()) -> StepCosts:
    chance, costs = random.Random(3), StepCosts()  # noqa: S311
    for number in range(400):
        tokens, history = chance.choice((64, 300, 1024, 2048, 8192)), chance.choice((0, 4_000, 60_000))
        seconds = true_s(tokens, history) * (1 + chance.uniform(-noise, noise))
        costs.saw_prefill(tokens, tokens * (history + tokens / 2), history, 10.0 if number in slow else seconds)
    return costs


@pytest.mark.parametrize(("tokens", "history"), [(64, 0), (1500, 0), (4096, 60_000), (700, 30_000), (8192, 4_000)])
def test_seconds_are_predicted_for_sizes_that_were_not_seen(tokens: int, history: int) -> None:
    assert learnt(noise=0.05).chunk_s(tokens, history) == pytest.approx(true_s(tokens, history), rel=0.15)


def test_steps_that_took_hundreds_of_times_as_long_change_little() -> None:
    costs = learnt(slow=frozenset({0, 1, 2, 399}))
    assert costs.chunk_s(2048, 4_000) == pytest.approx(true_s(2048, 4_000), rel=0.15)


def test_what_changes_is_learnt_anew() -> None:
    costs = learnt()
    for number in range(300):
        tokens = (64, 1024, 8192)[number % 3]
        costs.saw_prefill(tokens, tokens * tokens / 2, 0, 2 * true_s(tokens, 0))
    assert costs.chunk_s(1024, 0) == pytest.approx(2 * true_s(1024, 0), rel=0.1)


def test_steps_that_look_alike_leave_larger_ones_cheap_rather_than_dear() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.saw_prefill(64, 2048, 0, 0.045)
    assert costs.chunk_s(64, 0) == pytest.approx(0.045)
    assert costs.chunk_s(8192, 0) == pytest.approx(0.045)


def test_a_decode_steps_time_goes_with_its_answers_and_their_history() -> None:
    costs = StepCosts()
    for number in range(200):
        answers, history = 1 + number % 16, 10_000 * (number % 7)
        costs.saw_decode(answers, history, 0.006 + 1e-4 * answers + 2e-8 * history)
    assert costs.decode_s(8, 30_000) == pytest.approx(0.0074, rel=0.05)


def test_costs_settle_when_the_first_steps_do_not_count_any_more() -> None:
    costs = learnt()
    for _ in range(63):
        costs.saw_decode(1, 0, 0.01)
    assert not costs.is_settled
    costs.saw_decode(1, 0, 0.01)
    assert costs.is_settled


def test_nothing_is_predicted_before_anything_was_seen_and_impossible_times_are_left_out() -> None:
    costs = StepCosts()
    for seconds in (0.0, -1.0, float("inf"), float("nan")):
        costs.saw_decode(1, 0, seconds)
    assert (costs.decode_s(1, 0), costs.chunk_s(10, 0), costs.longest_tokens) == (None, None, 0)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.floats(1e-5, 100)), min_size=1, max_size=60)
)
def test_weights_are_never_negative_whatever_was_measured(steps: list[tuple[int, int, float]]) -> None:
    cost = LearntCost(3)
    for tokens, history, seconds in steps:
        cost.observe((1.0, tokens, history), seconds)
    assert all(0 <= weight < float("inf") for weight in cost.weights)
    assert (cost.predict((1.0, 5.0, 7.0)) or 0.0) >= 0


def test_a_target_is_missed_when_most_measured_pauses_are_longer_whatever_the_first_ones_were() -> None:
    costs = StepCosts()
    for _ in range(64):
        costs.saw_decode(4, 1000, 0.010)
    for _ in range(7):
        costs.saw_prefill(512, 131_072, 0, 2.0)  # kernels are compiled
        costs.saw_pause(2.0, 0.055)
    assert not costs.is_late  # too few to tell
    for _ in range(8):
        costs.saw_prefill(512, 131_072, 0, 0.020)
        costs.saw_pause(0.030, 0.055)
    assert not costs.is_late
    for _ in range(16):
        costs.saw_pause(0.060, 0.055)
    assert costs.is_late
    costs.forget_pauses()
    assert not costs.is_late
