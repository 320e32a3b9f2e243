"""What every ``EvictionPolicy`` promises, whatever its order: all that ship, and LRU's naive twin."""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import POLICIES, BlockKey, EvictionPolicy, PolicyContext, PolicyError, make_policy
from lab.research.naive_lru import NaiveLruPolicy
from tests.support.examples import examples

CAPACITY = 12
MAKERS: dict[str, Callable[[], EvictionPolicy]] = {
    **{name: partial(make_policy, name, capacity_blocks=CAPACITY) for name in POLICIES},
    "naive lru": NaiveLruPolicy,
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def make(request: pytest.FixtureRequest) -> Callable[[], EvictionPolicy]:
    return request.param


def ids(*blocks: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in blocks)


def wanted(blocks: int, *, used: int = 10) -> PolicyContext:
    return PolicyContext(tier=CacheTier.DDR, wanted_blocks=blocks, used_blocks=used, capacity_blocks=64)


@pytest.mark.parametrize(("name", "make"), MAKERS.items())
def test_a_policy_has_its_name(name: str, make: Callable[[], EvictionPolicy]) -> None:
    assert make().name == name


def test_an_empty_policy_has_no_victims(make: Callable[[], EvictionPolicy]) -> None:
    assert make().select_victims(wanted(3)).victims == ()


def test_nothing_wanted_is_nothing_chosen(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    policy.insert(ids(1, 2))
    assert policy.select_victims(wanted(0)).victims == ()
    assert len(policy) == 2


def test_a_number_of_blocks_that_cannot_be_wanted_is_refused_and_changes_nothing(
    make: Callable[[], EvictionPolicy],
) -> None:
    policy = make()
    policy.insert(ids(1, 2), ("a", "b"))
    for wrong in (-1, -(10**400), 1.5, 2.0, math.nan, math.inf, True, "2", None):
        with pytest.raises(PolicyError, match=r"^wanted_blocks is .*; it must be >= 0, a whole number$"):
            policy.select_victims(wanted(cast("int", wrong)))
    assert len(policy) == 2
    assert set(policy.select_victims(wanted(np.int64(1))).victims) < {1, 2}
    assert len(policy.select_victims(wanted(10**400)).victims) == 1


def test_a_decision_says_why(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    policy.insert(ids(1))
    assert policy.select_victims(wanted(1)).reason


def test_a_victim_may_come_back(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    policy.insert(ids(1))
    policy.select_victims(wanted(1))
    policy.insert(ids(1))
    assert policy.select_victims(wanted(1)).victims == ids(1)


def test_being_told_of_a_prompt_changes_no_block(make: Callable[[], EvictionPolicy]) -> None:
    policy, untold = make(), make()
    for each in (policy, untold):
        each.insert(ids(1, 2, 3), ("a", "b", "c"))
    policy.requested(("a", "b", "x"), block_tokens=4, prompt_tokens=11)
    assert len(policy) == 3
    assert policy.select_victims(wanted(9)).victims == untold.select_victims(wanted(9)).victims


_CALLS = st.lists(st.tuples(st.sampled_from(["insert", "access", "hold", "release"]), st.integers(0, 9)), max_size=60)


def tell(policy: EvictionPolicy, calls: list[tuple[str, int]]) -> tuple[set[int], set[int]]:
    """Tell of those calls that are possible; return who is resident then, and who is held."""
    resident, held = set[int](), set[int]()
    for call, block in calls:
        if call == "insert" and block not in resident:
            policy.insert(ids(block), (f"key {block}",))
            resident.add(block)
        elif call == "access" and block in resident:
            policy.access(ids(block))
        elif call == "hold" and block in resident - held:
            policy.hold(ids(block))
            held.add(block)
        elif call == "release" and block in held:
            policy.release(ids(block))
            held.remove(block)
    return resident, held


@pytest.mark.parametrize("capacity", [CAPACITY, 64])
@pytest.mark.parametrize("name", POLICIES)
@given(calls=_CALLS)
@example(calls=[("insert", 0), ("access", 0), ("access", 0)])
def test_fewer_than_wanted_go_only_when_the_rest_is_held(
    name: str, capacity: int, calls: list[tuple[str, int]]
) -> None:
    policy = make_policy(name, capacity_blocks=capacity)
    resident, held = tell(policy, calls)
    assert set(policy.select_victims(wanted(len(resident))).victims) == resident - held


@pytest.mark.parametrize("name", POLICIES)
@given(calls=_CALLS, blocks=st.integers(2, 8))
def test_many_chosen_at_once_are_those_chosen_one_by_one(name: str, calls: list[tuple[str, int]], blocks: int) -> None:
    at_once, one_by_one = (make_policy(name, capacity_blocks=CAPACITY) for _ in range(2))
    for each in (at_once, one_by_one):
        tell(each, calls)
    for _ in range(2):  # the second time with what they remember of the first
        victims = at_once.select_victims(wanted(blocks)).victims
        assert victims == sum((one_by_one.select_victims(wanted(1)).victims for _ in range(blocks)), ())
        for each in (at_once, one_by_one):
            each.insert(victims, [f"key {block}" for block in victims])


def test_a_removed_block_is_unknown_whether_held_or_not(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    policy.insert(ids(1, 2))
    policy.hold(ids(1))
    policy.remove(ids(1, 2))
    assert len(policy) == 0
    policy.insert(ids(1))
    assert policy.select_victims(wanted(5)).victims == ids(1)


@pytest.mark.parametrize("call", ["access", "hold", "release", "remove"])
def test_a_call_that_names_a_stranger_changes_nothing(make: Callable[[], EvictionPolicy], call: str) -> None:
    policy, untouched = make(), make()
    for each in (policy, untouched):
        each.insert(ids(1, 2))
        each.insert(ids(3))
    with pytest.raises(KeyError, match=r"9|not resident"):
        getattr(policy, call)(ids(1, 9))
    assert policy.select_victims(wanted(9)).victims == untouched.select_victims(wanted(9)).victims


def test_releasing_what_is_not_held_is_refused_and_changes_nothing(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    policy.insert(ids(1, 2))
    policy.hold(ids(1))
    with pytest.raises(ValueError, match="not held"):
        policy.release(ids(1, 2))
    assert policy.select_victims(wanted(9)).victims == ids(2)
    policy.release(ids(1))
    assert policy.select_victims(wanted(9)).victims == ids(1)


@pytest.mark.parametrize("path", [(2, 1), (3, 3)])
def test_a_block_is_inserted_once(make: Callable[[], EvictionPolicy], path: tuple[int, ...]) -> None:
    policy = make()
    policy.insert(ids(1))
    with pytest.raises(ValueError, match=r"resident|once|twice"):
        policy.insert(ids(*path))
    assert len(policy) == 1


@pytest.mark.parametrize("keys", [("a",), ("a", "b", "c")])
def test_blocks_have_a_key_each_or_none_has(make: Callable[[], EvictionPolicy], keys: tuple[str, ...]) -> None:
    policy = make()
    with pytest.raises(ValueError, match="keys"):
        policy.insert(ids(1, 2), keys)
    assert len(policy) == 0


@pytest.mark.parametrize("wrong", [[1], BlockKey([1])])  # type: ignore[arg-type]
def test_keys_that_cannot_be_remembered_are_refused_and_change_nothing(
    make: Callable[[], EvictionPolicy], wrong: object
) -> None:
    policy, untouched = make(), make()
    for each in (policy, untouched):
        each.insert(ids(1, 2, 3), ("a", "b", "c"))
    for keys in (("d", wrong), (wrong, "d")):
        with pytest.raises(PolicyError, match=r"^keys\[[01]\] is .*; allowed are hashable values$"):
            policy.insert(ids(4, 5), cast("tuple[str, ...]", keys))
        with pytest.raises(PolicyError, match=r"^keys\[[01]\] is .*; allowed are hashable values$"):
            policy.requested(cast("tuple[str, ...]", keys), block_tokens=4, prompt_tokens=8)
        coming = wanted(2)._replace(incoming=cast("tuple[str, ...]", keys))
        if policy.name == "arc":  # the others don't look at who comes
            with pytest.raises(PolicyError, match=r"^keys\[[01]\] is .*; allowed are hashable values$"):
                policy.select_victims(coming)
    assert len(policy) == 3
    assert policy.select_victims(wanted(9)).victims == untouched.select_victims(wanted(9)).victims


@pytest.mark.parametrize("wrong", [-1, 1.5, math.nan, math.inf, True, "2", None, 10**400])
def test_a_prompt_of_tokens_that_cannot_be_is_refused(make: Callable[[], EvictionPolicy], wrong: object) -> None:
    policy = make()
    number = cast("int", wrong)
    with pytest.raises(PolicyError, match=r"^block_tokens is .*; it must be >= 1 "):
        policy.requested(("a",), block_tokens=number, prompt_tokens=4)
    with pytest.raises(PolicyError, match=r"^prompt_tokens is .*; it must be >= 0 "):
        policy.requested(("a",), block_tokens=4, prompt_tokens=number)
    policy.requested((), block_tokens=4, prompt_tokens=0)


@pytest.mark.parametrize("call", ["access", "hold", "remove"])
def test_a_path_names_a_block_once(make: Callable[[], EvictionPolicy], call: str) -> None:
    policy = make()
    policy.insert(ids(1))
    with pytest.raises(ValueError, match=r"once|twice"):
        getattr(policy, call)(ids(1, 1))
    assert policy.select_victims(wanted(9)).victims == ids(1)


class Trie(RuleBasedStateMachine):
    """Blocks as a prefix cache has them: a forest of which requests hold, use and leave whole paths.

    Contents come again under new ids, with the same key. A head that a policy chooses though its tails stay is put
    back, as an engine does.
    """

    make: Callable[[], EvictionPolicy]

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make()
        self.keyed = True
        self.parent: dict[BlockId, BlockId | None] = {}
        self.keys: dict[BlockId, tuple[int, ...]] = {}
        self.running: list[tuple[BlockId, ...]] = []
        self.next = 0

    def path_to(self, block: BlockId | None) -> tuple[BlockId, ...]:
        path: list[BlockId] = []
        while block is not None:
            path.append(block)
            block = self.parent[block]
        return tuple(reversed(path))

    def held(self) -> set[BlockId]:
        return {block for path in self.running for block in path}

    def keys_of(self, path: list[BlockId]) -> list[tuple[int, ...]]:
        return [self.keys[block] for block in path] if self.keyed else []

    def evict_for(self, blocks: int, incoming: list[tuple[int, ...]]) -> None:
        free = self.parent.keys() - self.held()
        context = PolicyContext(
            tier=CacheTier.DDR,
            wanted_blocks=blocks,
            used_blocks=len(self.parent),
            capacity_blocks=CAPACITY,
            incoming=incoming,
        )
        victims = self.policy.select_victims(context).victims
        assert len(victims) == len(set(victims)) == min(blocks, len(free))
        assert set(victims) <= free
        back = []
        for victim in victims:
            if victim in self.parent.values():
                assert not self.policy.tails_first
                back.append(victim)
            else:
                del self.parent[victim]
        back.sort(key=lambda block: len(self.keys[block]))
        self.policy.insert(back, self.keys_of(back))

    @initialize(keyed=st.booleans())
    def choose(self, *, keyed: bool) -> None:
        self.keyed = keyed

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5), room=st.booleans())
    def begin(self, prompt: list[int], *, room: bool) -> None:
        keys = [tuple(prompt[: length + 1]) for length in range(len(prompt))]
        resident = {self.keys[block]: block for block in self.parent}
        hit = tuple(resident[key] for key in keys if key in resident)
        missing = keys[len(hit) :]
        self.policy.hold(hit)
        self.policy.access(hit)
        self.running.append(hit)
        if room:
            self.evict_for(len(missing), missing if self.keyed else [])
        above = hit[-1] if hit else None
        fresh = []
        for key in missing:
            block = BlockId(self.next)
            self.next += 1
            self.parent[block] = above
            self.keys[block] = key
            fresh.append(block)
            above = block
        self.policy.insert(fresh, self.keys_of(fresh))
        self.policy.hold(fresh)
        self.running[-1] = (*hit, *fresh)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.policy.release(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        self.policy.access(self.path_to(data.draw(st.sampled_from(list(self.parent)))))

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        lost = data.draw(st.sampled_from(list(self.parent)))
        gone = tuple(block for block in self.parent if lost in self.path_to(block))
        self.policy.remove(gone)
        self.running = [tuple(block for block in path if block not in gone) for path in self.running]
        for block in reversed(gone):
            del self.parent[block]

    @rule(blocks=st.integers(0, 6))
    def evict(self, blocks: int) -> None:
        self.evict_for(blocks, [])

    @invariant()
    def knows_all(self) -> None:
        assert len(self.policy) == len(self.parent)


@pytest.mark.hypothesis
def test_any_workload_of_paths_is_served(make: Callable[[], EvictionPolicy]) -> None:
    machine = type("Machine", (Trie,), {"make": staticmethod(make)})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
    )
