from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.window import SlidingWindow


def test_what_was_used_counts_for_sixty_seconds_and_at_most_one_more() -> None:
    window = SlidingWindow()
    window.add(3, 100.9)
    assert window.used(160.9) == 3
    assert window.used(161.0) == 0
    assert window.empty_in_s(161.0) == 0


def test_room_comes_when_enough_of_the_oldest_has_gone() -> None:
    window = SlidingWindow()
    for second in (10, 20, 30):
        window.add(5, second)
    assert window.free_in_s(5, 20, 31) == 0
    assert window.free_in_s(6, 20, 31) == 40
    assert window.free_in_s(11, 20, 31) == 50
    assert window.free_in_s(20, 20, 31) == 60
    assert window.empty_in_s(31) == 60


def test_a_correction_of_what_has_gone_changes_nothing() -> None:
    window = SlidingWindow()
    slot = window.add(5, 10)
    window.correct(slot, -2)
    assert window.used(11) == 3
    assert window.used(80) == 0
    window.correct(slot, -3)
    assert window.used(80) == 0


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 5)), max_size=60), st.integers(5, 20))
def test_no_minute_sees_more_than_the_limit_and_waiting_as_told_is_enough(
    steps: list[tuple[float, int]], limit: int
) -> None:
    window, now_s, taken = SlidingWindow(), 0.0, list[tuple[float, int]]()
    for pause_s, amount in steps:
        now_s += pause_s
        wait_s = window.free_in_s(amount, limit, now_s)
        if wait_s:
            now_s += wait_s
        assert window.free_in_s(amount, limit, now_s) == 0
        window.add(amount, now_s)
        taken.append((now_s, amount))
        assert sum(each for at_s, each in taken if now_s - 60 < at_s) <= limit
