"""Whatever policy decides, heads stay as long as tails of theirs are there: by itself and in a tier."""

import random
from collections.abc import Sequence
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.kv_policy import POLICIES, LruPolicy, PolicyContext, PolicyError, TailsFirst, make_policy
from kvcontrol.kv_runtime import QuotaManager
from kvcontrol.kv_runtime.record import BlockRecord
from kvcontrol.kv_runtime.resident import Block
from kvcontrol.kv_runtime.tier_space import TierSpace
from tests.support.examples import examples

CAPACITY = 12

Name = tuple[int, ...]
"""A block's place in the forest: the steps from the root to it."""


def wanted(blocks: int) -> PolicyContext:
    return PolicyContext(tier=CacheTier.DDR, wanted_blocks=blocks, used_blocks=CAPACITY, capacity_blocks=CAPACITY)


class Forest(RuleBasedStateMachine):
    """Requests hold and use whole paths; blocks are lost, also from the middle, and come again."""

    kind = ""

    def __init__(self) -> None:
        super().__init__()
        self.policy = TailsFirst(make_policy(self.kind, capacity_blocks=CAPACITY))
        self.blocks: dict[Name, BlockId] = {}
        self.running: list[list[Name]] = []
        self.kept: list[Name] = []
        self.next = 0

    def held(self) -> set[Name]:
        return {name for path in self.running for name in path}

    def ids(self, names: list[Name]) -> list[BlockId]:
        return [self.blocks[name] for name in names]

    def may_go(self) -> set[Name]:
        """The naive twin: who is not held or kept and comes before nobody who is, as far as the path has no gap."""
        stays = set()
        for name in self.held() | set(self.kept):
            while name in self.blocks:
                stays.add(name)
                name = name[:-1]  # noqa: PLW2901 - up the path
        return self.blocks.keys() - stays

    def evict_for(self, blocks: int) -> None:
        free = self.may_go()
        names = {block: name for name, block in self.blocks.items()}
        victims = [names[block] for block in self.policy.select_victims(wanted(blocks)).victims]
        assert len(set(victims)) == len(victims) == min(blocks, len(free))
        assert free >= set(victims)
        for victim in victims:
            del self.blocks[victim]
            assert not any(name[:-1] == victim for name in self.blocks), "a tail of it is still there"

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def begin(self, prompt: list[int]) -> None:
        path = [tuple(prompt[: length + 1]) for length in range(len(prompt))]
        missing = [name for name in path if name not in self.blocks]
        hit = [name for name in path if name in self.blocks]
        self.policy.hold(self.ids(hit))
        self.policy.access(self.ids(hit))
        self.running.append(hit)
        self.evict_for(max(0, len(self.blocks) + len(missing) - CAPACITY))
        for name in missing:
            self.blocks[name] = BlockId(self.next)
            self.next += 1
        self.policy.insert(self.ids(missing), missing, [name[:-1] or None for name in missing])
        self.policy.hold(self.ids(missing))
        self.running[-1] = path

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.policy.release(self.ids(self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def use_one(self, data: st.DataObject) -> None:
        self.policy.access(self.ids([data.draw(st.sampled_from(sorted(self.blocks)))]))

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def keep(self, prompt: list[int]) -> None:
        self.policy.keep(tuple(prompt))
        self.kept.append(tuple(prompt))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.policy.let_go(self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1))))

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def lose_one(self, data: st.DataObject) -> None:
        lost = data.draw(st.sampled_from(sorted(self.blocks)))
        self.policy.remove(self.ids([lost]))
        self.running = [[name for name in path if name != lost] for path in self.running]
        del self.blocks[lost]

    @rule(blocks=st.integers(0, 7))
    def evict(self, blocks: int) -> None:
        self.evict_for(blocks)

    @rule(kind=st.sampled_from(list(POLICIES)))
    def hand_over(self, kind: str) -> None:
        heir = make_policy(kind, capacity_blocks=CAPACITY)
        holds = [name for path in self.running for name in path]
        self.policy = self.policy.hand_over(heir, self.ids(sorted(set(holds))))
        for name in set(holds):
            for _ in range(holds.count(name) - 1):
                self.policy.hold(self.ids([name]))

    @rule(kind=st.sampled_from(list(POLICIES)))
    def begin_hand_over(self, kind: str) -> None:
        self.policy.begin_hand_over(make_policy(kind, capacity_blocks=CAPACITY))

    @precondition(lambda self: self.policy.has_successor)
    @rule(blocks=st.integers(1, 4))
    def continue_hand_over(self, blocks: int) -> None:
        self.policy.continue_hand_over(blocks)

    @precondition(lambda self: self.policy.has_successor)
    @rule()
    def end_hand_over(self) -> None:
        holds = [name for path in self.running for name in path]
        order = list(self.policy._links)
        self.policy = self.policy.end_hand_over(self.ids(sorted(set(holds))))
        assert list(self.policy._links) == order
        for name in set(holds):
            for _ in range(holds.count(name) - 1):
                self.policy.hold(self.ids([name]))

    @invariant()
    def adds_up(self) -> None:
        assert len(self.policy) == len(self.blocks)
        self.policy.check_integrity()


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", POLICIES)
def test_any_policy_gives_up_tails_before_heads_and_all_that_may_go(kind: str) -> None:
    machine = type("Machine", (Forest,), {"kind": kind})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
    )


def test_a_head_whose_turn_has_come_is_the_next_when_its_last_tail_has_gone() -> None:
    policy = TailsFirst(make_policy("fifo", capacity_blocks=8))
    head, tail, other = BlockId(1), BlockId(2), BlockId(3)
    policy.insert([head], ["h"], [None])
    policy.insert([other], ["o"], [None])
    policy.insert([tail], ["t"], ["h"])
    assert policy.select_victims(wanted(1)).victims == (other,)
    assert policy.aside_blocks == 1
    assert policy.select_victims(wanted(2)).victims == (tail, head)


def test_a_block_that_is_kept_keeps_its_turn_and_goes_next_once_it_is_let_go() -> None:
    policy = TailsFirst(make_policy("lru", capacity_blocks=8))
    blocks = [BlockId(1), BlockId(2), BlockId(3)]
    for block, key in zip(blocks, "abc", strict=True):
        policy.insert([block], [key], [None])
    policy.keep("a")
    assert policy.select_victims(wanted(1)).victims == (blocks[1],)
    policy.let_go("a")
    assert not policy.keeps
    assert policy.select_victims(wanted(2)).victims == (blocks[0], blocks[2])


def test_a_content_that_is_not_kept_can_not_be_let_go() -> None:
    with pytest.raises(ValueError, match="not kept"):
        TailsFirst(make_policy("lru", capacity_blocks=8)).let_go("a")


def test_a_head_that_is_used_again_waits_for_another_turn() -> None:
    policy = TailsFirst(make_policy("fifo", capacity_blocks=8))
    head, tail, other = BlockId(1), BlockId(2), BlockId(3)
    policy.insert([head], ["h"], [None])
    policy.insert([tail], ["t"], ["h"])
    policy.hold([tail])
    assert policy.select_victims(wanted(1)).victims == ()
    policy.access([head, tail])
    assert policy.aside_blocks == 0
    policy.insert([other], ["o"], [None])
    policy.release([tail])
    assert policy.select_victims(wanted(1)).victims == (tail,)


def test_tails_that_outlived_their_head_keep_it_when_it_comes_again() -> None:
    policy = TailsFirst(LruPolicy())
    policy.insert([BlockId(1), BlockId(2)], ["h", "t"], [None, "h"])
    policy.remove([BlockId(1)])
    policy.insert([BlockId(7)], ["h"], [None])
    policy.access([BlockId(2)])
    assert policy.select_victims(wanted(1)).victims == (BlockId(2),)


def test_a_policy_begins_empty_and_wrong_calls_change_nothing() -> None:
    used = LruPolicy()
    used.insert((BlockId(1),))
    with pytest.raises(ValueError, match="begins empty"):
        TailsFirst(used)
    policy = TailsFirst(LruPolicy())
    with pytest.raises(ValueError, match="1 keys and 0 parents"):
        policy.insert([BlockId(1)], ["a"], [])
    policy.insert([BlockId(1)], ["a"], [None])
    with pytest.raises(ValueError, match="resident already"):
        policy.insert([BlockId(1)], ["a"], [None])
    for keys, parents in (([["b"]], ["a"]), (["b"], [["a"]])):
        with pytest.raises(PolicyError, match=r"keys\[0\] is .*; allowed are hashable values"):
            policy.insert([BlockId(2)], keys, parents)  # type: ignore[arg-type]
    for wrong in (-1, 1.5, float("nan"), float("inf"), True):
        with pytest.raises(PolicyError, match=r"wanted_blocks is .*; it must be >= 0, a whole number"):
            policy.select_victims(wanted(wrong))  # type: ignore[arg-type]
    policy.begin_hand_over(LruPolicy())
    with pytest.raises(PolicyError, match=r"blocks is -1; it must be >= 0, a whole number"):
        policy.continue_hand_over(-1)
    assert policy.has_successor
    policy.check_integrity()
    assert policy.select_victims(wanted(2)).victims == (1,)


class Recorder(LruPolicy):
    """LRU, whose line is the order in which it would choose."""

    def line(self) -> list[BlockId]:
        return list(self._line)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), parts=st.integers(1, 6))
def test_a_policy_told_in_parts_knows_what_one_told_at_once_knows_in_the_same_order(
    data: st.DataObject, parts: int
) -> None:
    old = TailsFirst(LruPolicy())
    there: list[int] = []
    names = count()

    def come(blocks: int) -> None:
        path = [next(names) for _ in range(blocks)]
        old.insert([BlockId(name) for name in path], path, [None] * blocks)
        there.extend(path)

    come(data.draw(st.integers(1, 12)))
    in_parts = Recorder()
    old.begin_hand_over(in_parts)
    for _ in range(data.draw(st.integers(0, 20))):
        match data.draw(st.sampled_from(["come", "use", "lose", "evict", "part"])):
            case "come":
                come(data.draw(st.integers(1, 3)))
            case "use" if there:
                old.access([BlockId(data.draw(st.sampled_from(there)))])
            case "lose" if there:
                lost = data.draw(st.sampled_from(there))
                there.remove(lost)
                old.remove([BlockId(lost)])
            case "evict" if there:
                (victim,) = old.select_victims(wanted(1)).victims
                there.remove(victim)
            case "part":
                old.continue_hand_over(parts)
        old.check_integrity()
    at_once = Recorder()
    order = [BlockId(name) for name in old.policy._line]  # type: ignore[attr-defined]
    at_once.insert(order[::-1], order[::-1])
    heir = old.end_hand_over([])
    assert in_parts.line() == at_once.line() == order
    assert len(heir) == len(there)


def test_a_hand_over_that_fails_changes_nothing() -> None:
    class Refuses(LruPolicy):
        def insert(self, path: Sequence[BlockId], keys: Sequence[object] = ()) -> None:  # noqa: ARG002
            raise RuntimeError("no")

    old = TailsFirst(LruPolicy())
    old.insert([BlockId(1), BlockId(2)], ["a", "b"], [None, "a"])
    for fails in (lambda: old.continue_hand_over(1), lambda: old.end_hand_over([])):
        old.begin_hand_over(Refuses())
        with pytest.raises(RuntimeError, match="no"):
            fails()
        assert not old.has_successor
    with pytest.raises(ValueError, match="no hand-over has begun"):
        old.end_hand_over([])
    with pytest.raises(ValueError, match="no hand-over has begun"):
        old.continue_hand_over(1)
    old.check_integrity()
    assert old.select_victims(wanted(2)).victims == (2, 1)


def hold(space: TierSpace, path: list[Block], by: int) -> None:
    for block in path:
        block.holds += by
    if path:
        (space.hold if by > 0 else space.release)(path)


@pytest.mark.parametrize("kind", POLICIES)
def test_a_tier_gives_up_tails_before_heads_with_any_policy_also_when_policies_are_swapped(kind: str) -> None:
    rng = random.Random(3)  # noqa: S311 - reproducible, not secret
    space = TierSpace(
        CacheTier.DDR,
        capacity_blocks=CAPACITY,
        block_bytes=1,
        make_policy=partial(make_policy, kind, capacity_blocks=CAPACITY),
        quotas=QuotaManager(),
        on_free=lambda _: None,
    )
    here: dict[BlockId, Block] = {}
    by_key: dict[bytes, Block] = {}
    next_id = 0

    def evict(victims: list[BlockId]) -> None:
        for victim in victims:
            block = here.pop(victim)
            del by_key[block.record.key]
            assert all(other.record.parent != block.record.key for other in here.values())
            space.slots.free(block.copies.pop(CacheTier.DDR))

    for _ in range(600):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        keys = [bytes(prompt[: length + 1]) for length in range(len(prompt))]
        hit = [by_key[key] for key in keys if key in by_key]
        missing = [key for key in keys if key not in by_key]
        hold(space, hit, 1)
        copies = space.reserve("tenant", len(missing), evict)
        fresh = []
        for key, copy in zip(missing, copies, strict=False):
            block = Block(
                BlockId(next_id), BlockRecord(BlockHash(key), BlockHash(key[:-1]) or None, key, "tenant"), 0.0
            )
            next_id += 1
            block.copies[CacheTier.DDR] = copy
            here[block.block_id] = by_key[key] = block
            fresh.append(block)
        if fresh:
            space.insert(fresh)
        hold(space, hit, -1)
        if rng.random() < 0.1:
            other = rng.choice(list(POLICIES))
            space.policies.begin_swap(partial(make_policy, other, capacity_blocks=CAPACITY))
        if space.policies.has_successors:
            if (missing_blocks := space.policies.continue_swap(rng.randrange(4))) == 0 or rng.random() < 0.2:
                space.end_swap(here.values())
                assert not space.policies.has_successors
            else:
                assert 0 < missing_blocks <= len(here)
        space.check_integrity(list(here.values()))
