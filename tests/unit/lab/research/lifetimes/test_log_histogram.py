"""Quantiles of logarithmic histograms are those of the values, as far as a bucket tells."""

import random

import pytest

from lab.research.lifetimes.log_histogram import (
    BUCKETS,
    LogHistogram,
    bucket_at,
    bucket_of,
    mass_between,
    middle_of,
    start_of,
)


def filled(values: list[float], memory: float = 1e9) -> LogHistogram:
    histogram = LogHistogram(memory)
    for value in values:
        histogram.add(value)
    return histogram


def test_a_value_lies_in_its_bucket() -> None:
    for value in (1.5, 2, 17, 1_000, 123_456.7):
        bucket = bucket_of(value)
        assert start_of(bucket) <= value * 1.0001
        assert value <= start_of(bucket + 1) * 1.0001
    assert bucket_of(0) == bucket_of(1) == 0
    assert bucket_of(1e30) == BUCKETS - 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("above", [0.0, 80.0])
def test_quantiles_of_what_is_above(share: float, above: float) -> None:
    rng = random.Random(1)  # noqa: S311 - reproducible, not secret
    values = [rng.uniform(10, 1_000) for _ in range(5_000)]
    left = sorted(value for value in values if value > above)
    bucket = bucket_at(filled(values).counts, share, above=above)
    assert bucket is not None
    assert middle_of(bucket) == pytest.approx(left[int(share * len(left))], rel=0.1)


def test_nothing_above_has_no_quantile() -> None:
    assert bucket_at(filled([5.0]).counts, 0.5, above=1_000) is None
    assert bucket_at(filled([]).counts, 0.5) is None


def test_mass_and_fading() -> None:
    histogram = filled([10.0] * 30 + [1_000.0] * 10)
    assert mass_between(histogram.counts, 8, 12) == 30
    assert filled([10.0] * 100 + [1_000.0] * 100, memory=50).counts[bucket_of(10)] < 10
