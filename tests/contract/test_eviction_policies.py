"""What every ``EvictionPolicy`` promises, whatever its order: a new policy adds itself to ``POLICIES``."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import EvictionPolicy, LruPolicy, NaiveLruPolicy, PolicyContext

POLICIES: list[Callable[[], EvictionPolicy]] = [LruPolicy, NaiveLruPolicy]


@pytest.fixture(params=POLICIES, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Callable[[], EvictionPolicy]:
    return request.param


def ids(*blocks: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in blocks)


def wanted(blocks: int, *, used: int = 10) -> PolicyContext:
    return PolicyContext(tier=CacheTier.DDR, wanted_blocks=blocks, used_blocks=used, capacity_blocks=64)


def test_a_policy_has_a_name(make: Callable[[], EvictionPolicy]) -> None:
    assert make().name


def test_an_empty_policy_has_no_victims(make: Callable[[], EvictionPolicy]) -> None:
    assert make().select_victims(wanted(3)).victims == ()


def test_nothing_wanted_is_nothing_chosen(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    policy.insert(ids(1, 2))
    assert policy.select_victims(wanted(0)).victims == ()
    assert len(policy) == 2


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


@pytest.mark.parametrize("call", ["access", "hold", "remove"])
def test_a_path_names_a_block_once(make: Callable[[], EvictionPolicy], call: str) -> None:
    policy = make()
    policy.insert(ids(1))
    with pytest.raises(ValueError, match=r"once|twice"):
        getattr(policy, call)(ids(1, 1))
    assert policy.select_victims(wanted(9)).victims == ids(1)


class Trie(RuleBasedStateMachine):
    """Blocks as a prefix cache has them: a forest of which requests hold, use and leave whole paths."""

    make: Callable[[], EvictionPolicy]

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make()
        self.parent: dict[BlockId, BlockId | None] = {}
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

    @rule(data=st.data(), new=st.integers(1, 4))
    def begin(self, data: st.DataObject, new: int) -> None:
        above = data.draw(st.sampled_from([None, *self.parent]))
        hit = self.path_to(above)
        fresh = []
        for _ in range(new):
            block = BlockId(self.next)
            self.next += 1
            self.parent[block] = above
            fresh.append(block)
            above = block
        self.policy.hold(hit)
        self.policy.access(hit)
        self.policy.insert(fresh)
        self.policy.hold(fresh)
        self.running.append((*hit, *fresh))

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
        free = self.parent.keys() - self.held()
        victims = self.policy.select_victims(wanted(blocks, used=len(self.parent))).victims
        assert len(victims) == len(set(victims)) == min(blocks, len(free))
        assert set(victims) <= free
        for victim in victims:
            assert victim not in self.parent.values()  # no head before its tails
            del self.parent[victim]

    @invariant()
    def knows_all(self) -> None:
        assert len(self.policy) == len(self.parent)


def test_any_workload_of_paths_is_served(make: Callable[[], EvictionPolicy]) -> None:
    machine = type("Machine", (Trie,), {"make": staticmethod(make)})
    run_state_machine_as_test(machine, settings=settings(max_examples=120, stateful_step_count=40, deadline=None))
