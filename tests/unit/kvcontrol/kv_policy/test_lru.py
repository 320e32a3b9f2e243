"""The order in which LRU gives blocks up, and that it is its naive twin's."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import LruPolicy, PolicyContext
from lab.research.naive_lru import NaiveLruPolicy
from tests.support.examples import examples


def ids(*blocks: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in blocks)


def wanted(blocks: int) -> PolicyContext:
    return PolicyContext(tier=CacheTier.HBM, wanted_blocks=blocks, used_blocks=blocks, capacity_blocks=100)


def test_a_path_goes_tail_first() -> None:
    policy = LruPolicy()
    policy.insert(ids(1, 2, 3))
    assert policy.select_victims(wanted(2)).victims == ids(3, 2)
    assert policy.select_victims(wanted(2)).victims == ids(1)
    assert len(policy) == 0


def test_what_was_used_longest_ago_goes_first() -> None:
    policy = LruPolicy()
    for block in range(4):
        policy.insert(ids(block))
    policy.access(ids(0, 1))
    assert policy.select_victims(wanted(4)).victims == ids(2, 3, 1, 0)


def test_a_held_block_stays_until_the_last_release_and_is_then_the_youngest() -> None:
    policy = LruPolicy()
    policy.insert(ids(1))
    policy.insert(ids(2))
    policy.hold(ids(1))
    policy.hold(ids(1))
    policy.release(ids(1))
    policy.access(ids(1))
    assert policy.select_victims(wanted(9)).victims == ids(2)
    policy.insert(ids(3))
    policy.release(ids(1))
    assert policy.select_victims(wanted(9)).victims == ids(3, 1)


def test_holding_does_not_move_those_that_are_not_held() -> None:
    policy = LruPolicy()
    policy.insert(ids(1, 2))
    policy.insert(ids(3))
    policy.hold(ids(1))
    assert policy.select_victims(wanted(9)).victims == ids(2, 3)


def test_a_long_life_keeps_the_order_of_its_twin_and_no_more_places_than_blocks() -> None:
    rng = random.Random(5)  # noqa: S311 - reproducible, not secret
    policy, twin = LruPolicy(), NaiveLruPolicy()
    resident: set[BlockId] = set()
    for _ in range(2_000):
        path = [BlockId(block) for block in rng.sample(range(50), 8)]
        new, old = [block for block in path if block not in resident], [block for block in path if block in resident]
        gone = [twin.select_victims(wanted(len(new))).victims, policy.select_victims(wanted(len(new))).victims]
        assert gone[0] == gone[1]
        resident.difference_update(gone[0])
        old = [block for block in old if block in resident]
        for each in (policy, twin):
            each.hold(old[:3])
            each.insert(new)
            each.access(old)
            each.release(old[:3])
        resident.update(new)
    assert len(policy._places) <= 2 * len(policy) + 64


def test_the_reason_says_which_policy_and_why() -> None:
    assert LruPolicy().select_victims(wanted(1)).reason == "lru: used longest ago"


class AgainstTheTwin(RuleBasedStateMachine):
    """Any order of calls, sensible or not, gets the same answers from both."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LruPolicy()
        self.twin = NaiveLruPolicy()

    @rule(
        call=st.sampled_from(["insert", "access", "hold", "release", "remove"]),
        path=st.lists(st.integers(0, 9).map(BlockId), max_size=5),
    )
    def call(self, call: str, path: list[BlockId]) -> None:
        outcomes = []
        for policy in (self.policy, self.twin):
            try:
                getattr(policy, call)(path)
                outcomes.append("done")
            except (KeyError, ValueError) as error:
                outcomes.append(type(error).__name__)
        assert outcomes[0] == outcomes[1]

    @precondition(lambda self: len(self.twin) > 0)
    @rule(blocks=st.integers(0, 4))
    def select(self, blocks: int) -> None:
        assert self.policy.select_victims(wanted(blocks)).victims == self.twin.select_victims(wanted(blocks)).victims

    @invariant()
    def same_size(self) -> None:
        assert len(self.policy) == len(self.twin)


TestAgainstTheTwin = AgainstTheTwin.TestCase
TestAgainstTheTwin.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
