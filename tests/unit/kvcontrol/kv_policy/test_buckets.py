"""Buckets always show the lowest that has anything in it, and keep nothing of those that emptied."""

from hypothesis import given
from hypothesis import strategies as st

from kvcontrol.kv_policy.buckets import Buckets


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8))), st.integers(1, 4))
def test_the_lowest_bucket_is_that_of_a_plain_search(moves: list[tuple[int, int]], at_once: int) -> None:
    buckets: Buckets[int, None] = Buckets()
    where: dict[int, int] = {}
    for number, key in moves:
        if key in where:
            buckets.take(where.pop(key), key)
        if number:
            buckets.put(number, key, None)
            where[key] = number
        lowest = buckets.lowest()
        if lowest is None:
            assert not where
        else:
            assert lowest[0] == min(where.values())
            assert list(lowest[1]) == [key for key, of in where.items() if of == lowest[0]]
    while (taken := buckets.take_lowest(at_once)) is not None:
        number, things = taken
        keys = [key for key, _ in things]
        assert number == min(where.values())
        assert keys == [key for key, of in where.items() if of == number][:at_once]
        for key in keys:
            del where[key]
    assert not where
    assert not buckets._buckets


def test_a_thing_that_climbs_for_ever_leaves_nothing_behind() -> None:
    buckets: Buckets[str, None] = Buckets()
    buckets.put(0, "stays", None)
    buckets.put(1, "climbs", None)
    for number in range(1, 10_000):
        buckets.take(number, "climbs")
        buckets.put(number + 1, "climbs", None)
    assert len(buckets._buckets) == 2
    assert len(buckets._numbers) < 100
