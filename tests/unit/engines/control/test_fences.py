"""Older changes of a store are refused, and stores don't lock each other out."""

import pytest

from engines.control.errors import StaleFenceError
from engines.control.fences import MOST_STORES, Fences
from kvcontrol.core.policy_control import Fence


def test_an_older_fence_is_refused_and_an_equal_or_newer_one_is_taken() -> None:
    fences = Fences()
    fences.accept("eviction", Fence("s", 5))
    fences.accept("eviction", Fence("s", 5))
    fences.accept("eviction", Fence("s", 7))
    with pytest.raises(StaleFenceError, match="the fence 6 of store 's' is older than 7; nothing was changed"):
        fences.accept("eviction", Fence("s", 6))
    assert fences.report() == {"eviction": {"s": 7}}


def test_kinds_and_stores_have_fences_of_their_own() -> None:
    fences = Fences()
    fences.accept("eviction", Fence("s", 5))
    fences.accept("pace", Fence("s", 1))
    fences.accept("eviction", Fence("other", 1))
    assert fences.report() == {"eviction": {"s": 5, "other": 1}, "pace": {"s": 1}}


def test_the_store_that_sent_nothing_for_the_longest_time_is_forgotten() -> None:
    fences = Fences()
    for number in range(MOST_STORES):
        fences.accept("eviction", Fence(str(number), 5))
    fences.accept("eviction", Fence("0", 6))
    fences.accept("eviction", Fence("new", 5))
    assert set(fences.report()["eviction"]) == {"0", "new", *map(str, range(2, MOST_STORES))}
    fences.accept("eviction", Fence("1", 1))
