"""A buddy region refuses only what really doesn't fit, and no unit ever has two owners."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcontrol.kv_runtime import AllocationError, NoSpace, Shortage
from lab.research.pool.buddy import BuddyAllocator
from lab.research.pool.naive import NaiveUnits
from tests.support.examples import examples


def given_out(buddy: BuddyAllocator, count: int, order: int) -> list[int]:
    starts = buddy.allocate(count, order=order)
    assert isinstance(starts, list)
    return starts


def test_a_fresh_region_is_cut_from_its_start() -> None:
    buddy = BuddyAllocator(16)
    assert given_out(buddy, 3, 1) == [0, 2, 4]
    assert given_out(buddy, 1, 3) == [8]
    assert given_out(buddy, 2, 0) == [6, 7]
    assert buddy.free_units == 0


def test_large_runs_are_kept_whole_as_long_as_smaller_ones_do() -> None:
    buddy = BuddyAllocator(8)
    one = given_out(buddy, 1, 0)
    given_out(buddy, 1, 0)
    assert buddy.available(2) == 1
    buddy.free(one, order=0)
    given_out(buddy, 3, 0)
    assert buddy.available(2) == 1


def test_freed_buddies_become_the_larger_run_again_when_it_is_wanted() -> None:
    buddy = BuddyAllocator(8)
    buddy.free(given_out(buddy, 8, 0), order=0)
    assert given_out(buddy, 1, 3) == [0]


def test_enough_units_that_do_not_lie_together_are_a_refusal_that_says_so() -> None:
    buddy = BuddyAllocator(4)
    starts = given_out(buddy, 4, 0)
    buddy.free([starts[0], starts[2]], order=0)
    assert buddy.allocate(1, order=1) == NoSpace(wanted=1, available=0, shortage=Shortage.FRAGMENTED)
    assert buddy.allocate(3, order=0) == NoSpace(wanted=3, available=2, shortage=Shortage.FULL)


def test_a_region_that_is_no_power_of_two_is_used_to_its_end() -> None:
    buddy = BuddyAllocator(11)
    assert given_out(buddy, 2, 2) == [0, 4]
    assert sorted(given_out(buddy, 3, 0)) == [8, 9, 10]
    buddy.check_integrity()


def test_a_given_run_can_be_taken_out_of_a_larger_one() -> None:
    buddy = BuddyAllocator(16)
    buddy.take(6, order=1)
    assert (buddy.used_units, buddy.available(3), buddy.available(2)) == (2, 1, 3)
    for start, order in ((6, 1), (7, 0), (4, 2), (5, 1), (16, 0), (-1, 0)):
        with pytest.raises(AllocationError):
            buddy.take(start, order=order)
    buddy.check_integrity()


def test_a_run_is_freed_once_and_as_what_it_was_allocated() -> None:
    buddy = BuddyAllocator(8)
    starts = given_out(buddy, 2, 1)
    for wrong, order in (([starts[0]], 0), ([starts[0], starts[0]], 1), ([6], 1)):
        with pytest.raises(AllocationError):
            buddy.free(wrong, order=order)
    assert buddy.used_units == 4
    buddy.check_integrity()


def test_what_can_not_be_is_refused_by_name() -> None:
    with pytest.raises(AllocationError, match="at least 1"):
        BuddyAllocator(0)
    with pytest.raises(AllocationError, match="orders 0 to 2"):
        BuddyAllocator(7).allocate(1, order=3)
    with pytest.raises(AllocationError, match="-1 runs"):
        BuddyAllocator(7).allocate(-1, order=0)


class BuddyMachine(RuleBasedStateMachine):
    """A buddy region beside one that knows the owner of every unit."""

    @initialize(units=st.integers(1, 40))
    def start(self, units: int) -> None:
        self.buddy = BuddyAllocator(units)
        self.naive = NaiveUnits(units)
        self.out: dict[int, int] = {}

    @rule(count=st.integers(0, 6), data=st.data())
    def allocate(self, count: int, data: st.DataObject) -> None:
        order = data.draw(st.integers(0, self.buddy.max_order))
        fits = self.naive.available(order)
        starts = self.buddy.allocate(count, order=order)
        if count > fits:
            together = count << order <= self.naive.free_units
            shortage = Shortage.FRAGMENTED if together else Shortage.FULL
            assert starts == NoSpace(wanted=count, available=fits, shortage=shortage)
            return
        assert isinstance(starts, list)
        assert len(starts) == count
        for start in starts:
            self.naive.take(start, order=order)
            self.out[start] = order

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        order = self.out[data.draw(st.sampled_from(sorted(self.out)))]
        alike = sorted(start for start, its in self.out.items() if its == order)
        starts = data.draw(st.lists(st.sampled_from(alike), unique=True))
        self.buddy.free(starts, order=order)
        self.naive.free(starts, order=order)
        for start in starts:
            del self.out[start]

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        order = data.draw(st.integers(0, self.buddy.max_order))
        start = data.draw(st.integers(0, self.buddy.units - 1))
        try:
            self.naive.take(start, order=order)
        except AllocationError:
            with pytest.raises(AllocationError):
                self.buddy.take(start, order=order)
        else:
            self.buddy.take(start, order=order)
            self.out[start] = order

    @precondition(lambda self: hasattr(self, "buddy"))
    @rule()
    def compare(self) -> None:
        for order in range(self.buddy.max_order + 1):
            assert self.buddy.available(order) == self.naive.available(order)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "buddy"):
            self.buddy.check_integrity()
            assert self.buddy.free_units == self.naive.free_units

    def teardown(self) -> None:
        if hasattr(self, "buddy"):
            for start, order in self.out.items():
                self.buddy.free([start], order=order)
            assert self.buddy.used_units == 0
            assert self.buddy.available(self.buddy.max_order) == 1


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
