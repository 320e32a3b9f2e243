"""The least number that is enough is found in few tries, and no lucky exception is taken for it."""

import pytest

from lab.plan.search import least_enough


@pytest.mark.parametrize("most", [1, 2, 7, 64])
@pytest.mark.parametrize("first", [1, 5, 64])
def test_whatever_is_tried_first_the_least_one_is_found(first: int, most: int) -> None:
    for least in range(1, most + 1):
        found = least_enough(lambda number, least=least: number >= least, first=first, most=most)
        assert (found.least, found.exceptions) == (least, ())
        assert len(found.tried) == len(set(found.tried)) <= 2 * most.bit_length() + 3


def test_a_good_guess_takes_three_tries() -> None:
    assert sorted(least_enough(lambda number: number >= 9, first=9, most=64).tried) == [8, 9, 10]


def test_where_none_is_enough_the_largest_was_tried() -> None:
    found = least_enough(lambda _: False, first=1, most=20)
    assert found.least is None
    assert found.tried == (1, 2, 4, 8, 16, 20)


def test_one_that_is_enough_below_one_that_is_not_is_an_exception() -> None:
    found = least_enough(lambda number: number >= 6 or number == 4, first=4, most=32)
    assert (found.least, found.exceptions) == (6, (4,))
    found = least_enough(lambda number: number == 3, first=3, most=8)
    assert (found.least, found.exceptions) == (None, (3,))
