import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcontrol.scheduler_ir.strategies.arrivals import Arrivals
from kvcontrol.scheduler_ir.strategies.base import WaitingId


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=150))
def test_those_that_came_late_stand_in_their_place_like_all_others(changes: list[tuple[int, int]]) -> None:
    """Three of four come, mostly in order; the others leave from anywhere."""
    line: Arrivals[tuple[float, int]] = Arrivals()
    expected: dict[WaitingId, tuple[float, int]] = {}
    for number, (kind, when) in enumerate(changes):
        request = WaitingId(str(number))
        if kind:
            item = (float(number if kind > 1 else when), number)
            line.add(request, item)
            expected[request] = item
        elif expected:
            leaver = list(expected)[when % len(expected)]
            assert line.remove(leaver) == expected.pop(leaver)
            with pytest.raises(KeyError):
                line.remove(leaver)
    line.check_integrity()
    assert list(line) == sorted(expected.values())
    assert len(line) == len(expected)
    assert all(each in line for each in expected)
    if expected:
        assert line.first == min(expected.values())
    else:
        assert line.first is None


def test_an_integrity_check_finds_what_is_wrong() -> None:
    line: Arrivals[tuple[float, int]] = Arrivals()
    for number in range(3):
        line.add(WaitingId(str(number)), (float(number), number))
    line._in_order.move_to_end(WaitingId("0"))
    with pytest.raises(AssertionError, match="out of order"):
        line.check_integrity()
