import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcontrol.scheduler_ir.strategies.line import CHUNK, Line

ITEMS = st.tuples(st.integers(0, 40), st.integers(0, 40))


@given(st.lists(st.tuples(st.booleans(), ITEMS), max_size=200), st.integers(0, 3 * CHUNK))
def test_a_line_is_a_sorted_set(changes: list[tuple[bool, tuple[int, int]]], behind: int) -> None:
    line: Line[tuple[int, int]] = Line()
    expected: set[tuple[int, int]] = set()
    for is_add, item in changes:
        if is_add and item not in expected:
            line.add(item)
            expected.add(item)
        elif item in expected:
            line.remove(item)
            expected.remove(item)
        else:
            with pytest.raises(KeyError):
                line.remove(item)
    line.check_integrity()
    assert list(line) == sorted(expected)
    assert (len(line), bool(line)) == (len(expected), bool(expected))
    line.append([(99, number) for number in range(behind)])
    expected |= {(99, number) for number in range(behind)}
    line.check_integrity()
    assert list(line) == sorted(expected)
    if expected:
        assert line.first == min(expected) == line.pop_first()
        line.check_integrity()
        assert list(line) == sorted(expected)[1:]


@pytest.mark.parametrize("order", [1, -1, 7919])
def test_chunks_stay_short_and_go_when_they_are_empty(order: int) -> None:
    line: Line[tuple[int]] = Line()
    count = 8 * CHUNK + 1
    places = [(order * place) % count for place in range(count)]
    for place in places:
        line.add((place,))
    line.check_integrity()
    for place in sorted(places)[:-1]:
        line.remove((place,))
    line.check_integrity()
    assert list(line) == [(count - 1,)]


def test_an_integrity_check_finds_what_is_wrong() -> None:
    line: Line[tuple[int]] = Line()
    line.add((1,))
    line.add((2,))
    line._chunks[0].reverse()
    with pytest.raises(AssertionError, match="out of order"):
        line.check_integrity()
