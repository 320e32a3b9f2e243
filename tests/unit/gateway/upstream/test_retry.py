import pytest

from gateway.upstream import Attempts, FailureKind, RetryBudget


def test_the_budget_allows_a_burst_and_then_its_ratio() -> None:
    budget = RetryBudget(0.2)
    assert sum(budget.take() for _ in range(1000)) == 100
    taken = 0
    for _ in range(1000):
        budget.request()
        taken += budget.take()
    assert 199 <= taken <= 201


def test_idle_time_does_not_save_up_more_than_a_burst() -> None:
    budget = RetryBudget(1.0)
    for _ in range(1000):
        budget.request()
    assert sum(budget.take() for _ in range(1000)) == 100


def test_a_ratio_of_zero_allows_none() -> None:
    budget = RetryBudget(0.0)
    budget.request()
    assert not budget.take()


def attempts(*, most: int = 4, others: int = 1, ratio: float = 1.0) -> Attempts:
    made = Attempts(RetryBudget(ratio), most=most)
    made.begin(others=lambda: others)
    return made


@pytest.mark.parametrize(
    "ended", [FailureKind.CONNECT, FailureKind.CONNECT_TIMEOUT, FailureKind.NO_ANSWER, FailureKind.HUNG, 502, 503]
)
def test_what_was_not_taken_may_be_tried_again(ended: FailureKind | int) -> None:
    assert attempts().again(ended)


@pytest.mark.parametrize(
    "ended",
    [FailureKind.FIRST_BYTE_TIMEOUT, FailureKind.CUT, FailureKind.IDLE_TIMEOUT, 200, 400, 404, 408, 429, 500, 501, 504],
)
def test_everything_else_may_not(ended: FailureKind | int) -> None:
    assert not attempts().again(ended)


def test_there_is_no_other_try_without_another_instance_attempts_left_or_budget() -> None:
    assert not attempts(others=0).again(503)
    assert not attempts(most=1).again(503)
    assert not attempts(ratio=0.0).again(503)


def test_a_request_that_two_instances_died_under_is_given_up() -> None:
    tries = attempts()
    assert tries.again(FailureKind.NO_ANSWER)
    tries.begin(others=lambda: 1)
    assert tries.again(503)
    tries.begin(others=lambda: 1)
    assert not tries.again(FailureKind.NO_ANSWER)


def test_an_instance_that_hangs_under_a_request_counts_like_one_that_dies() -> None:
    tries = attempts()
    assert tries.again(FailureKind.HUNG)
    tries.begin(others=lambda: 1)
    assert not tries.again(FailureKind.NO_ANSWER)
