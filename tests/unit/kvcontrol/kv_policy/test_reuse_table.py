"""Hazards and indices follow from the gaps that were told."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.kv_policy.reuse_table import BUCKETS, ReuseTable, bucket_of, index_of, start_of
from tests.support.examples import examples


def test_buckets_cover_all_ages_without_a_gap() -> None:
    assert [bucket_of(start_of(bucket)) for bucket in range(BUCKETS)] == list(range(BUCKETS))
    assert [bucket_of(start_of(bucket + 1) - 1) for bucket in range(BUCKETS - 1)] == list(range(BUCKETS - 1))
    assert bucket_of(1 << 60) == BUCKETS - 1
    assert bucket_of(-1) == 0


def gaps(table: ReuseTable, klass: int, *, used: dict[int, int], ended: dict[int, int], now: int = 1_000_000) -> None:
    for tell, told in ((table.used, used), (table.ended, ended)):
        for gap, times in told.items():
            for _ in range(times):
                table.begun(klass, now - gap)
                tell(klass, now - gap, now)


def test_hazards_are_shares_of_what_got_so_far() -> None:
    table = ReuseTable(2, patience=100, window=1 << 30)
    gaps(table, 0, used={10: 10_000, 1_000: 10_000}, ended={500: 20_000})
    hazards = table.hazards(0, 1_000_000)
    assert hazards[bucket_of(10)] == pytest.approx(1 / 4, rel=0.01)
    assert hazards[bucket_of(500)] == 0
    assert hazards[bucket_of(1_000)] == pytest.approx(1, rel=0.01)


def test_what_is_still_open_counts_as_having_got_as_far_as_it_has() -> None:
    table = ReuseTable(1, patience=100, window=2_560)  # slots of ten ticks
    gaps(table, 0, used={10: 500}, ended={}, now=10_000)
    for _ in range(500):
        table.begun(0, 9_000)
    assert table.hazards(0, 10_000)[bucket_of(10)] == pytest.approx(1 / 2, rel=0.01)
    table.ended(0, 9_000, 10_000)


@settings(max_examples=examples(60), deadline=None)
@given(
    told=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 900), st.sampled_from(["used", "ended", "open"])), max_size=60
    ),
    patience=st.integers(1, 5_000),
)
def test_hazards_and_indices_are_those_of_a_list_of_all_gaps(told: list[tuple[int, int, str]], patience: int) -> None:
    now = 1_000
    table = ReuseTable(2, patience=patience, window=256)  # begin times are known to the tick
    for klass, gap, end in told:
        table.begun(klass, now - gap)
        if end == "used":
            table.used(klass, now - gap, now)
        elif end == "ended":
            table.ended(klass, now - gap, now)

    def counts(bucket: int, klasses: set[int]) -> tuple[int, int]:
        own = [(bucket_of(gap), end) for klass, gap, end in told if klass in klasses]
        return own.count((bucket, "used")), sum(reached >= bucket for reached, _ in own)

    hazards = []
    for bucket in range(BUCKETS):
        used, reached = counts(bucket, {0, 1})
        overall = used / reached if reached else 0
        used, reached = counts(bucket, {0})
        hazards.append((used + 32 * overall) / (reached + 32))
    assert table.hazards(0, now) == pytest.approx(hazards)

    for first in (0, 7, 20):
        best = 0.0
        for last in range(first, BUCKETS):
            left, used_by, waited = 1.0, 0.0, 0.0
            for bucket in range(first, last + 1):
                width = start_of(bucket + 1) - start_of(bucket)
                waited += left * (1 - hazards[bucket] / 2) * width
                used_by += left * hazards[bucket]
                left *= 1 - hazards[bucket]
            best = max(best, used_by / waited)
            if waited >= patience or left < 0.02:
                break
        assert index_of(table.hazards(0, now), first, patience) == pytest.approx(max(best, 1e-12))


def test_a_class_never_seen_is_like_all_together() -> None:
    table = ReuseTable(2, patience=100, window=1 << 30)
    gaps(table, 0, used={10: 100}, ended={})
    assert table.hazards(1, 1_000_000)[bucket_of(10)] == pytest.approx(1)


def test_a_constant_hazard_gives_that_many_uses_per_tick() -> None:
    per_tick = 0.001
    hazards = [1 - (1 - per_tick) ** (start_of(bucket + 1) - start_of(bucket)) for bucket in range(BUCKETS)]
    for age in (0, 10, 200, 5_000):
        assert index_of(hazards, bucket_of(age), 1 << 30) == pytest.approx(per_tick, rel=0.3)


def test_who_comes_back_for_certain_is_worth_more_the_nearer_that_is() -> None:
    hazards = [0.0] * BUCKETS
    hazards[bucket_of(1_000)] = 1.0
    worths = [index_of(hazards, bucket_of(age), 1 << 30) for age in (10, 500, 900)]
    assert worths == sorted(worths)
    assert worths[0] == pytest.approx(1 / 1_000, rel=0.2)
    assert index_of(hazards, bucket_of(10), 100) < 1e-9, "nobody waits that long"


def test_waiting_ends_where_it_is_best() -> None:
    hazards = [0.0] * BUCKETS
    hazards[bucket_of(10)] = 0.5
    alone = index_of(hazards, 0, 1 << 30)
    hazards[bucket_of(1_000_000)] = 0.5
    assert index_of(hazards, 0, 1 << 30) == pytest.approx(alone)


def test_before_anything_is_known_the_youngest_is_worth_most() -> None:
    table = ReuseTable(3, patience=100, window=100)
    assert table.worth(0, bucket_of(5)) > table.worth(2, bucket_of(600))


def test_what_is_long_past_fades() -> None:
    rng = random.Random(1)  # noqa: S311 - reproducible, not secret
    table = ReuseTable(1, patience=100, window=1_024)
    for gap in (10, 100):
        for _ in range(5_000):
            gaps(table, 0, used={gap + rng.randrange(3): 1}, ended={})
    hazards = table.hazards(0, 1_000_000)
    assert hazards[bucket_of(10)] < 0.02
    assert hazards[bucket_of(100)] > 0.9
