from gateway.upstream import RetryBudget


def test_the_budget_allows_a_burst_and_then_its_ratio() -> None:
    budget = RetryBudget(0.2)
    assert sum(budget.take() for _ in range(100)) == 10
    taken = 0
    for _ in range(1000):
        budget.request()
        taken += budget.take()
    assert 199 <= taken <= 201


def test_idle_time_does_not_save_up_more_than_a_burst() -> None:
    budget = RetryBudget(1.0)
    for _ in range(1000):
        budget.request()
    assert sum(budget.take() for _ in range(100)) == 10


def test_a_ratio_of_zero_allows_none() -> None:
    budget = RetryBudget(0.0)
    budget.request()
    assert not budget.take()
