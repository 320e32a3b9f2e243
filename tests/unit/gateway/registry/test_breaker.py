from gateway.registry import Breaker, BreakerRules, BreakerState

RULES = BreakerRules(failures=3, pause_s=1, longest_pause_s=4, trial_s=5)


def opened(breaker: Breaker, now_s: float) -> None:
    for _ in range(RULES.failures):
        breaker.failed(now_s, "cut")


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not_count_on() -> None:
    breaker = Breaker(RULES)
    for _ in range(4):
        breaker.failed(0, "cut")
        breaker.failed(0, "cut")
        breaker.succeeded()
    assert breaker.state(0) is BreakerState.CLOSED
    opened(breaker, 0)
    assert breaker.state(0.9) is BreakerState.OPEN
    assert not breaker.allows(0.9)
    assert breaker.reason == "cut"


def test_after_its_pause_it_allows_one_request_and_a_good_answer_closes_it() -> None:
    breaker = Breaker(RULES)
    opened(breaker, 0)
    assert breaker.allows(1)
    breaker.picked(1)
    assert not breaker.allows(1.1)
    breaker.succeeded()
    assert breaker.state(1.2) is BreakerState.CLOSED
    assert breaker.allows(1.2)
    assert not breaker.reason


def test_a_failed_trial_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    breaker = Breaker(RULES)
    opened(breaker, 0)
    now_s = 1.0
    for pause_s in (2, 4, 4):
        breaker.picked(now_s)
        breaker.failed(now_s, "cut")
        assert not breaker.allows(now_s + pause_s - 0.1)
        now_s += pause_s
        assert breaker.allows(now_s)


def test_a_trial_that_never_ends_keeps_nobody_out_for_ever() -> None:
    breaker = Breaker(RULES)
    opened(breaker, 0)
    assert breaker.allows(1)
    breaker.picked(1)
    assert not breaker.allows(5.9)
    assert breaker.allows(6)


def test_failures_of_what_was_running_do_not_prolong_a_pause() -> None:
    breaker = Breaker(RULES)
    opened(breaker, 0)
    opened(breaker, 0.5)
    assert breaker.allows(1)


def test_an_instance_that_returns_is_half_open_at_once() -> None:
    breaker = Breaker(RULES)
    opened(breaker, 0)
    breaker.returned()
    assert breaker.state(0.1) is BreakerState.HALF_OPEN
    assert breaker.allows(0.1)


def test_it_says_whether_its_trial_is_under_way_and_for_how_long_it_allows_nothing() -> None:
    breaker = Breaker(RULES)
    assert (breaker.on_trial(0), breaker.left_s(0)) == (False, 0)
    opened(breaker, 0)
    assert (breaker.on_trial(0.4), breaker.left_s(0.4)) == (False, 0.6)
    assert (breaker.on_trial(1), breaker.left_s(1)) == (False, 0)
    breaker.picked(1)
    assert (breaker.on_trial(2), breaker.left_s(2)) == (True, 4)
    assert (breaker.on_trial(6), breaker.left_s(6)) == (False, 0)
    breaker.picked(6)
    breaker.trial_over()
    assert breaker.allows(6), "nothing was learned by it"
    breaker.picked(6)
    breaker.succeeded()
    assert (breaker.on_trial(6), breaker.left_s(6)) == (False, 0)
