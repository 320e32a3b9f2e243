"""The contiguous baseline reserves first-fit, and says what its reservations and holes lose."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcontrol.kv_runtime import NoSpace, RequestError, Shortage
from lab.research.pool.naive import NaiveTokens
from lab.research.pool.slot_layout import SlotLayout
from tests.support.examples import examples


def test_what_is_reserved_and_not_written_is_internal_fragmentation() -> None:
    layout = SlotLayout(100)
    layout.allocate("a", 10, reserve=40)
    assert layout.get_fragmentation().internal_ratio == 0.75
    layout.append("a", 10)
    assert layout.get_fragmentation().internal_ratio == 0.5


def test_free_tokens_outside_of_the_largest_hole_are_external_fragmentation() -> None:
    layout = SlotLayout(100)
    for name in "abcde":
        layout.allocate(name, 1, reserve=20)
    layout.free("b")
    layout.free("d")
    assert layout.get_fragmentation().external_ratio == 0.5
    assert layout.allocate("f", 1, reserve=30) == NoSpace(wanted=1, available=0, shortage=Shortage.FRAGMENTED)
    assert layout.allocate("f", 1, reserve=41) == NoSpace(wanted=1, available=0, shortage=Shortage.FULL)
    layout.free("c")
    assert layout.get_fragmentation().external_ratio == 0
    assert layout.allocate("f", 1, reserve=60) == 20


def test_misuse_is_refused_by_name() -> None:
    layout = SlotLayout(10)
    layout.allocate("a", 2, reserve=4)
    with pytest.raises(RequestError, match="has a slot already"):
        layout.allocate("a", 1, reserve=1)
    with pytest.raises(RequestError, match="5 tokens in a slot of 4"):
        layout.allocate("b", 5, reserve=4)
    with pytest.raises(RequestError, match="2 of 4"):
        layout.append("a", 3)
    with pytest.raises(RequestError, match="has no slot"):
        layout.free("b")
    with pytest.raises(RequestError, match="at least 1"):
        SlotLayout(0)


class SlotMachine(RuleBasedStateMachine):
    """The layout beside one that knows the owner of every token."""

    @initialize(capacity=st.integers(1, 40))
    def start(self, capacity: int) -> None:
        self.layout = SlotLayout(capacity)
        self.naive = NaiveTokens(capacity)
        self.room: dict[str, tuple[int, int]] = {}
        self.named = 0

    @rule(reserve=st.integers(1, 20), data=st.data())
    def allocate(self, reserve: int, data: st.DataObject) -> None:
        tokens = data.draw(st.integers(1, reserve))
        self.named += 1
        name = f"r{self.named}"
        start = self.layout.allocate(name, tokens, reserve=reserve)
        expected = self.naive.allocate(name, reserve)
        if expected is None:
            assert isinstance(start, NoSpace)
        else:
            assert start == expected
            self.room[name] = (tokens, reserve)

    @precondition(lambda self: getattr(self, "room", None))
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.room)))
        tokens, reserve = self.room[name]
        if tokens == reserve:
            with pytest.raises(RequestError):
                self.layout.append(name)
        else:
            self.layout.append(name)
            self.room[name] = (tokens + 1, reserve)

    @precondition(lambda self: getattr(self, "room", None))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.room)))
        self.layout.free(name)
        self.naive.free(name)
        del self.room[name]
        with pytest.raises(RequestError):
            self.layout.free(name)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "layout"):
            self.layout.check_integrity()
            assert self.layout._holes == self.naive.holes()
            assert self.layout.written_tokens == sum(tokens for tokens, _ in self.room.values())

    def teardown(self) -> None:
        if hasattr(self, "layout"):
            for name in self.room:
                self.layout.free(name)
            assert (self.layout.reserved_tokens, len(self.layout)) == (0, 0)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)
