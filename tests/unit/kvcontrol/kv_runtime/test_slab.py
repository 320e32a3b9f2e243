"""A slab hands each slot to one owner at a time, gives all or nothing, and says what it was misused with."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcontrol.kv_runtime import AllocationError, NoSpace, SlabAllocator
from tests.support.examples import examples


def test_a_fresh_slab_gives_the_lowest_slots_first() -> None:
    assert SlabAllocator(5).allocate(3) == [0, 1, 2]


def test_what_was_freed_last_is_given_first() -> None:
    slab = SlabAllocator(5)
    slab.allocate(4)
    slab.free([1, 2])
    assert slab.allocate(3) == [1, 2, 4]


def test_fewer_slots_than_asked_for_is_a_refusal_that_changes_nothing() -> None:
    slab = SlabAllocator(2)
    assert slab.allocate(3) == NoSpace(wanted=3, available=2)
    assert (slab.used, slab.available) == (0, 2)


def test_nothing_asked_for_is_nothing_given_also_when_full() -> None:
    slab = SlabAllocator(1)
    slab.allocate(1)
    assert slab.allocate(0) == []
    slab.free([])
    assert slab.used == 1


@pytest.mark.parametrize("slots", [[0, 3], [9], [-1], [0, 0]], ids=["free", "too high", "negative", "named twice"])
def test_a_wrong_free_is_refused_by_name_and_changes_nothing(slots: list[int]) -> None:
    slab = SlabAllocator(4)
    slab.allocate(2)
    with pytest.raises(AllocationError, match=r"isn't in use|named twice"):
        slab.free(slots)
    assert slab.used == 2
    slab.check_integrity()


def test_slots_found_after_a_restart_are_taken_by_number_and_not_given_again() -> None:
    slab = SlabAllocator(4)
    slab.take(1)
    slab.take(3)
    assert slab.available == 2
    assert slab.allocate(2) == [0, 2]
    slab.free([1])
    assert slab.allocate(1) == [1]


def test_taking_a_slot_that_is_used_or_not_there_is_refused() -> None:
    slab = SlabAllocator(2)
    slab.take(0)
    for slot in (0, 2, -1):
        with pytest.raises(AllocationError, match=f"slot {slot} "):
            slab.take(slot)


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_slab_without_slots_is_refused(capacity: int) -> None:
    with pytest.raises(AllocationError, match="at least 1"):
        SlabAllocator(capacity)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(AllocationError, match="-1 slots"):
        SlabAllocator(1).allocate(-1)


class SlabMachine(RuleBasedStateMachine):
    """A slab beside a plain set of the slots that are out."""

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity: int) -> None:
        self.slab = SlabAllocator(capacity)
        self.out: set[int] = set()

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        free = self.slab.capacity - len(self.out)
        slots = self.slab.allocate(count)
        if count > free:
            assert slots == NoSpace(wanted=count, available=free)
            return
        assert isinstance(slots, list)
        assert len(set(slots)) == count
        assert self.out.isdisjoint(slots)
        self.out.update(slots)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.out)), unique=True))
        self.slab.free(slots)
        self.out.difference_update(slots)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, self.slab.capacity - 1))
        if slot in self.out:
            with pytest.raises(AllocationError):
                self.slab.take(slot)
        else:
            self.slab.take(slot)
            self.out.add(slot)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "slab"):
            assert self.slab.used == len(self.out)
            assert self.slab.used + self.slab.available == self.slab.capacity
            assert all((slot in self.slab) == (slot in self.out) for slot in range(self.slab.capacity))

    def teardown(self) -> None:
        if hasattr(self, "slab"):
            self.slab.check_integrity()
            self.slab.free(sorted(self.out))
            assert self.slab.used == 0
            self.slab.check_integrity()


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
