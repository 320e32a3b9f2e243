from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcontrol.scheduler_ir.strategies.base import WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.ladder import Ladder, Place

REQUEST = WaitingRequest(request_id=WaitingId("r"), arrived_s=0.0)
RANKS = st.sampled_from([-1e300, -0.25, 0.0, 0.1, 0.1, 0.2, 0.25, 0.4, 7.0, 1e300, float("inf"), float("-inf")])
STEPS = st.tuples(st.sampled_from(["add", "add", "add", "remove", "look", "first", "until"]), RANKS, st.integers(0, 60))


@given(st.lists(STEPS, max_size=80))
def test_a_ladder_is_a_sorted_set_however_far_anybody_has_looked(steps: list[tuple[str, float, int]]) -> None:
    ladder, expected = Ladder(), list[Place]()
    for number, (step, rank, place) in enumerate(steps):
        match step:
            case "add":
                expected.append((rank, float(place), number, REQUEST))
                expected.sort(key=lambda each: each[:3])
                ladder.add(next(each for each in expected if each[2] == number))
            case "remove" if expected:
                ladder.remove(expected.pop(place % len(expected)))
            case "look":
                assert list(islice(ladder, place)) == expected[:place]
            case "first":
                assert ladder.first == (expected[0] if expected else None)
            case "until":
                gone = ladder.pop_until(rank)
                assert gone == expected[: len(gone)]
                assert all(each[0] <= rank for each in gone)
                del expected[: len(gone)]
                assert not expected or expected[0][0] > rank
        assert len(ladder) == len(expected)
        ladder.check_integrity()
    assert list(ladder) == expected
    ladder.check_integrity()


@pytest.mark.parametrize("look_at", [0, 9])
def test_who_is_not_there_is_a_key_error(look_at: int) -> None:
    ladder = Ladder()
    ladder.add((5.0, 0.0, 1, REQUEST))
    assert len(list(islice(ladder, look_at))) == min(1, look_at)
    for missing in ((5.0, 0.0, 2, REQUEST), (9.0, 0.0, 3, REQUEST), (-9.0, 0.0, 4, REQUEST)):
        with pytest.raises(KeyError):
            ladder.remove(missing)
    assert list(ladder) == [(5.0, 0.0, 1, REQUEST)]


def test_an_integrity_check_finds_what_is_wrong_in_a_ladder() -> None:
    ladder = Ladder()
    ladder.add((5.0, 0.0, 1, REQUEST))
    ladder._far[20.0][2] = (7.0, 0.0, 2, REQUEST)
    with pytest.raises(AssertionError, match="not whole"):
        ladder.check_integrity()
