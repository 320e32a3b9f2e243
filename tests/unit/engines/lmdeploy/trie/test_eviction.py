"""Eviction through a policy, on LMDeploy's own block trie, allocator and sequences; no engine."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engines.lmdeploy.hooks import eviction_hooks
from engines.lmdeploy.patching import install
from engines.lmdeploy.trie.contents import content_of
from engines.lmdeploy.trie.deferral import Deferral
from engines.lmdeploy.trie.eviction import TrieEviction, eviction_of
from engines.lmdeploy.trie.prefixes import take_out
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import (
    POLICIES,
    AdaptivePolicy,
    ContentKey,
    EvictionDecision,
    LruPolicy,
    PolicyContext,
    ShadowPolicies,
    make_policy,
)
from kvcontrol.kv_policy.spec import parse_specs
from lab.research.naive_lru import NaiveLruPolicy
from tests.support.block_trie import BLOCK_TOKENS, Paging, prompt
from tests.support.examples import examples

LOGGER = "engines.lmdeploy.trie.eviction"


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> Iterator[None]:
    undo = install(eviction_hooks())
    yield
    undo()


class HeadsFirst(LruPolicy):
    """The worst order there is: the block used last goes first, heads before tails."""

    name = "heads first"

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        count = min(context.wanted_blocks, len(self._line))
        victims = tuple(self._line.popitem()[0] for _ in range(count))
        return EvictionDecision(victims=victims, reason="heads first")


class Failing(LruPolicy):
    """Fails at one of its calls, from a moment on."""

    name = "failing"

    def __init__(self, call: str) -> None:
        super().__init__()
        self._call = call
        self.armed = False

    def __getattribute__(self, name: str) -> Any:
        if name in {"insert", "access", "hold", "release", "select_victims"} and self.armed and name == self._call:
            raise OSError(f"no {name} today")
        return super().__getattribute__(name)


class Stranger(LruPolicy):
    """Chooses one good victim and then a block that it was never told of."""

    name = "stranger"

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        good = super().select_victims(context).victims
        return EvictionDecision(victims=(*good[:1], BlockId(10_000)), reason="a mistake")


def eviction(paging: Paging) -> TrieEviction:
    found = eviction_of(paging.trie)
    assert found is not None
    return found


def check(paging: Paging) -> None:
    eviction(paging).check_integrity(paging.trie)


def nodes(paging: Paging) -> list[Any]:
    found, waiting = [], list(paging.trie._roots.values())
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        if node.parent is not None:
            found.append(node)
    return found


def evictable(paging: Paging) -> int:
    """The naive twin of how much an eviction can free: the nodes whose whole subtree nobody uses."""

    def count(node: Any) -> tuple[int, bool]:
        below = [count(child) for child in node.children.values()]
        free = all(each[1] for each in below) and node.parent is not None
        free = free and int(paging.trie.allocator.get_ref_count(node.block_id)) == 1
        return sum(each[0] for each in below) + free, free

    return sum(count(root)[0] for root in paging.trie._roots.values())


def test_access_times_have_fractions_of_seconds() -> None:
    paging = Paging(8)
    assert paging.trie.allocator._log_mem.access_time.dtype == np.float64
    paging.serve(prompt(1, 1))
    paging.serve(prompt(2, 1))
    used = paging.trie.allocator.get_access_time(np.array([node.block_id for node in nodes(paging)]))
    assert len(set(used.tolist())) == 2


def test_prompts_go_in_the_order_of_their_last_use_within_one_second() -> None:
    paging = Paging(61)
    order = random.Random(4).sample(range(20), 20)  # noqa: S311 - reproducible, not secret
    for seed in range(20):
        paging.serve(prompt(seed, 3))
    for seed in order:
        assert paging.serve(prompt(seed, 3)) == 3 * BLOCK_TOKENS
    for gone in range(1, 21):
        assert paging.trie.evict(3) == 3
        held = [seed for seed in order if paging.held_prefix(prompt(seed, 3)) == 3]
        assert held == order[gone:]
    check(paging)


def test_a_prompt_goes_tail_first() -> None:
    paging = Paging(16)
    paging.serve(prompt(1, 6))
    for left in (4, 2, 0):
        assert paging.trie.evict(2) == 2
        assert paging.held_prefix(prompt(1, 6)) == left
    assert paging.trie.evict(1) == 0
    assert paging.free == 16


def test_a_prefix_in_use_again_and_again_survives_a_flood_of_prompts_used_once() -> None:
    paging = Paging(24)
    hot = prompt(0, 6)
    paging.serve(hot)
    for seed in range(1, 100):
        paging.serve(prompt(seed, 5))
        assert paging.serve([*hot[:-1], seed]) == 6 * BLOCK_TOKENS
    check(paging)


def test_a_policy_that_follows_prompts_counts_the_tokens_that_they_find() -> None:
    paging, rng = Paging(40), random.Random(9)  # noqa: S311
    policy = AdaptivePolicy(39)
    eviction(paging).swap(policy)
    for _ in range(300):
        paging.serve(prompt(rng.randrange(12), rng.randrange(1, 9)))
    check(paging)
    state = policy.state()
    assert state.hits == paging.trie.stats.num_hit_tokens > 0
    assert state.hits >= 0.99 * state.lru_hits > 0


def test_a_prompt_that_comes_in_chunks_is_told_once_and_whole() -> None:
    told: list[list[int]] = []

    class Listening(AdaptivePolicy):
        def requested(self, prompt: Sequence[ContentKey], *, block_tokens: int, prompt_tokens: int) -> None:
            told.append(list(prompt))  # type: ignore[arg-type]
            super().requested(prompt, block_tokens=block_tokens, prompt_tokens=prompt_tokens)

    paging = Paging(40)
    eviction(paging).swap(Listening(39))
    sequence = paging.begin(prompt(1, 6))
    paging.trie.allocate(sequence)
    paging.trie.allocate(sequence)
    assert [len(contents) for contents in told] == [6]
    paging.end(sequence)
    assert told[0] == [content_of(node) for node in sorted(nodes(paging), key=lambda node: node.prefix_len)]


def test_what_a_request_uses_stays_whatever_is_asked_for() -> None:
    paging = Paging(32)
    running = paging.begin(prompt(1, 5))
    paging.serve(prompt(2, 5))
    assert paging.trie.evict(1_000) == 5
    assert paging.held_prefix(prompt(1, 5)) == 5
    check(paging)
    paging.end(running)
    assert paging.trie.evict(1_000) == 5


def test_a_leased_tail_keeps_its_heads_until_the_lease_ends() -> None:
    paging = Paging(32)
    paging.serve(prompt(1, 4))
    tail = np.array([max(nodes(paging), key=lambda node: node.prefix_len).block_id])
    paging.blocks.pin_logical_blocks(tail)
    paging.serve(prompt(2, 2))
    assert paging.trie.evict(10) == 2
    assert paging.held_prefix(prompt(1, 4)) == 4
    check(paging)
    assert paging.trie.evict(10) == 0
    paging.blocks.release_logical_blocks(tail)
    check(paging)
    assert paging.trie.evict(10) == 4


def test_a_block_referenced_twice_in_one_call_is_held_once() -> None:
    paging = Paging(8)
    paging.serve(prompt(1, 1))
    twice = np.array([nodes(paging)[0].block_id] * 2)
    paging.blocks.pin_logical_blocks(twice)
    check(paging)
    assert paging.trie.evict(5) == 0
    paging.blocks.release_logical_blocks(twice[:1])
    check(paging)
    assert paging.trie.evict(5) == 0
    paging.blocks.release_logical_blocks(twice[:1])
    assert paging.trie.evict(5) == 1


def test_a_policy_that_chooses_heads_first_frees_as_much_and_tails_first() -> None:
    paging = Paging(64)
    eviction(paging).swap(HeadsFirst())
    paging.serve(prompt(1, 5))
    paging.serve(prompt(2, 5))
    running = paging.begin(prompt(2, 2))
    for wanted in (1, 3, 2, 4):
        expected = min(wanted, evictable(paging))
        assert paging.trie.evict(wanted) == expected
        check(paging)
    assert paging.held_prefix(prompt(2, 5)) == 2
    paging.end(running)
    assert paging.trie.evict(99) == 2
    assert paging.free == 64


def test_a_policy_that_chooses_what_is_in_use_gets_it_back() -> None:
    class Careless(LruPolicy):
        def select_victims(self, context: PolicyContext) -> EvictionDecision:
            victims = tuple([*self._holds, *self._line][: context.wanted_blocks])
            self.remove(victims)
            return EvictionDecision(victims=victims, reason="careless")

    paging = Paging(16)
    eviction(paging).swap(Careless())
    running = paging.begin(prompt(1, 3))
    paging.serve(prompt(2, 3))
    assert paging.trie.evict(5) == 3
    assert paging.held_prefix(prompt(1, 3)) == 3
    check(paging)
    paging.end(running)
    check(paging)
    assert paging.trie.evict(5) == 3


def test_a_policy_that_insists_on_what_is_in_use_is_relieved() -> None:
    class Stubborn(LruPolicy):
        def select_victims(self, context: PolicyContext) -> EvictionDecision:
            return EvictionDecision(victims=tuple(self._holds)[: context.wanted_blocks], reason="stubborn")

    paging = Paging(16)
    eviction(paging).swap(Stubborn())
    paging.serve(prompt(1, 3))
    paging.begin(prompt(2, 3))
    assert paging.trie.evict(5) == 3
    assert eviction(paging).failed
    assert paging.held_prefix(prompt(2, 3)) == 3


def test_a_policy_is_told_of_paths_in_prompt_order() -> None:
    told: list[list[BlockId]] = []

    class Recording(LruPolicy):
        def insert(self, path: Any, keys: Any = ()) -> None:
            told.append(list(path))
            super().insert(path, keys)

    paging = Paging(16)
    eviction(paging).swap(Recording())
    paging.serve(prompt(1, 4))
    path = [node.block_id for node in sorted(nodes(paging), key=lambda node: node.prefix_len)]
    paging.blocks.pin_logical_blocks(np.array(path[-1:]))
    assert paging.trie.evict(4) == 0
    assert told == [path]
    paging.serve(prompt(1, 4))
    assert told == [path, path[:-1]]  # fresh, and told anew: their turn had come, they stayed for their tail's sake


def test_a_policy_that_chooses_more_than_wanted_is_relieved() -> None:
    class Greedy(LruPolicy):
        def select_victims(self, context: PolicyContext) -> EvictionDecision:
            every = PolicyContext(tier=context.tier, wanted_blocks=99, used_blocks=0, capacity_blocks=0)
            return super().select_victims(every)

    paging = Paging(16)
    eviction(paging).swap(Greedy())
    paging.serve(prompt(1, 6))
    assert paging.trie.evict(2) == 2
    assert eviction(paging).failed
    assert paging.held_prefix(prompt(1, 6)) == 4


@pytest.mark.parametrize("call", ["insert", "access", "hold", "release", "select_victims"])
def test_after_a_failure_lmdeploys_own_eviction_does_the_work(call: str, caplog: pytest.LogCaptureFixture) -> None:
    paging = Paging(16)
    policy = Failing(call)
    eviction(paging).swap(policy)
    paging.serve(prompt(1, 4))
    running = paging.begin(prompt(2, 4))
    policy.armed = True
    for seed in range(3, 40):
        paging.serve(prompt(seed, 5))
        paging.serve(prompt(seed, 5))
    assert eviction(paging).errors == 1
    assert f"no {call} today" in caplog.text
    assert paging.held_prefix(prompt(2, 4)) == 4
    paging.end(running)
    assert paging.trie.leaves == {node for node in nodes(paging) if not node.children}
    assert paging.free + len(nodes(paging)) == 16
    assert paging.trie.evict(99) > 0
    assert paging.free == 16


def test_a_failure_in_the_middle_of_an_eviction_loses_no_block() -> None:
    paging = Paging(16)
    eviction(paging).swap(Stranger())
    paging.serve(prompt(1, 6))
    assert paging.trie.evict(4) == 4
    assert eviction(paging).errors == 1
    assert paging.held_prefix(prompt(1, 6)) == 2
    assert paging.free == 14


def test_a_new_policy_takes_over_in_the_order_of_last_use() -> None:
    paging = Paging(40)
    for seed in range(4):
        paging.serve(prompt(seed, 3))
    paging.serve(prompt(0, 3))
    running = paging.begin(prompt(1, 3))
    eviction(paging).swap(NaiveLruPolicy())
    assert eviction(paging).policy.name == "naive lru"
    check(paging)
    paging.trie.evict(4)
    assert [paging.held_prefix(prompt(seed, 3)) for seed in range(4)] == [3, 3, 0, 2]
    paging.end(running)
    paging.trie.evict(4)
    assert [paging.held_prefix(prompt(seed, 3)) for seed in range(4)] == [1, 3, 0, 0]
    check(paging)


def test_a_policy_that_knows_something_already_is_refused() -> None:
    paging = Paging(8)
    used = LruPolicy()
    used.insert((BlockId(1),))
    with pytest.raises(ValueError, match="begins empty, lru knows 1"):
        eviction(paging).swap(used)


def test_no_policy_is_taken_once_lmdeploys_own_eviction_rules() -> None:
    paging = Paging(8)
    policy = Failing("select_victims")
    eviction(paging).swap(policy)
    policy.armed = True
    paging.serve(prompt(1, 1))
    paging.trie.evict(1)
    with pytest.raises(RuntimeError, match="has taken over"):
        eviction(paging).swap(LruPolicy())


def test_only_an_accepted_match_counts_as_a_use() -> None:
    told: list[list[BlockId]] = []

    class Recording(LruPolicy):
        def access(self, path: Any) -> None:
            told.append(list(path))
            super().access(path)

    import torch

    paging = Paging(32)
    eviction(paging).swap(Recording())
    paging.serve(prompt(1, 3))
    assert told == []
    path = [node.block_id for node in sorted(nodes(paging), key=lambda node: node.prefix_len)]
    tried = paging.scheduler.add_session(900).add_sequence(torch.tensor(prompt(1, 3)))
    paging.trie.match(tried)
    paging.blocks.truncate(tried, 0)
    assert told == []
    paging.serve(prompt(1, 3))
    assert told == [path]


def test_a_match_that_is_accepted_twice_for_one_prompt_counts_once() -> None:
    told: list[list[BlockId]] = []

    class Recording(LruPolicy):
        def access(self, path: Any) -> None:
            told.append(list(path))
            super().access(path)

    paging = Paging(32)
    eviction(paging).swap(Recording())
    watched = ShadowPolicies(parse_specs("lru"), capacity_blocks=32)
    eviction(paging).shadows.policies = watched
    paging.serve(prompt(1, 3))
    seq = paging.begin(prompt(1, 3))
    assert len(told) == 1
    requests = watched.report().requests
    paging.trie.finalize_match(seq)  # as after a load
    assert len(told) == 1
    assert watched.report().requests == requests == 2


def test_a_match_of_blocks_that_are_told_of_later_counts() -> None:
    paging = Paging(32)
    watched = ShadowPolicies(parse_specs("lru"), capacity_blocks=32)
    eviction(paging).shadows.policies = watched
    eviction(paging).defer(60.0)
    paging.serve(prompt(1, 3))  # as a load's blocks
    paging.serve(prompt(1, 3))
    eviction(paging).settle_now()
    assert watched.report().requests == 2


def test_a_model_with_recurrent_state_keeps_lmdeploys_own(caplog: pytest.LogCaptureFixture) -> None:
    from lmdeploy.pytorch.paging.block_manager.base_block_manager import LogicalAllocator
    from lmdeploy.pytorch.paging.block_trie import BlockTrie
    from lmdeploy.pytorch.paging.state_manager import StateManager

    manager = StateManager(8, 0, 4)
    allocator = LogicalAllocator(0, 16)
    trie = BlockTrie(allocator=allocator, block_size=4, enabled=True, checkpoint_state_manager=manager)
    assert eviction_of(trie) is None
    assert caplog.text.count("recurrent state") == 1
    assert trie.evict(4) == 0


def late(paging: Paging) -> TrieEviction:
    """Have the policy of a pool told later, of all that comes from now on."""
    of = eviction(paging)
    of.deferral = Deferral(lambda: 0.0)
    of.defer(0.1)
    return of


def test_blocks_that_were_freed_when_nothing_waited_yet_come_again_for_others() -> None:
    paging = Paging(9)
    paging.serve(prompt(1, 8)[:-1])
    late(paging)
    assert take_out(paging.trie, nodes(paging)) == (8, 0)
    paging.serve(prompt(2, 8)[:-1])
    check(paging)


def test_the_rest_of_a_path_is_known_whose_tail_was_taken_out_before_it_was_told_of() -> None:
    paging = Paging(16)
    late(paging)
    paging.serve(prompt(1, 6)[:-1])
    tail = max(nodes(paging), key=lambda node: node.prefix_len)
    assert take_out(paging.trie, [tail]) == (1, 0)
    check(paging)
    assert paging.trie.evict(16) == 5


def test_a_sequence_may_get_other_blocks_before_it_is_told_which_it_gave_back() -> None:
    paging = Paging(16)
    first, other = paging.begin(prompt(1, 3)[:-1]), paging.begin(prompt(2, 3)[:-1])
    assert first is not None
    assert other is not None
    late(paging)
    paging.end(first)
    first.logical_blocks.append(other.logical_blocks.get_real_blocks())  # the same memory, as when it is matched again
    check(paging)
    assert paging.trie.evict(16) == 3


class Workload(RuleBasedStateMachine):
    """Requests come, share prefixes, decode, end and are cancelled in a pool too small for them.

    The same in a second pool whose policy is the naive twin: the tries must stay equal, and both must free exactly
    what can be freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.twin = self.pools = (Paging(20), Paging(20))
        eviction(self.twin).swap(NaiveLruPolicy())
        self.running: list[list[Any]] = []
        self.leases: list[list[Any]] = []

    @rule(shared=st.integers(0, 3), blocks=st.integers(1, 6), own=st.integers(0, 2), more=st.integers(0, 3))
    def begin(self, shared: int, blocks: int, own: int, more: int) -> None:
        tokens = prompt(0, 6)[: shared * BLOCK_TOKENS] + prompt(1 + own, blocks)[: blocks * BLOCK_TOKENS + more]
        admitted = [pool.begin(tokens) for pool in self.pools]
        assert len({sequence is None for sequence in admitted}) == 1
        if admitted[0] is not None:
            assert len({sequence.cached_tokens for sequence in admitted}) == 1
            self.running.append(admitted)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        for pool, sequence in zip(self.pools, self.running.pop(data.draw(self.any_of(self.running))), strict=True):
            pool.end(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), start=st.integers(0, 4), length=st.integers(1, 3))
    def lease(self, data: st.DataObject, start: int, length: int) -> None:
        leased = []
        for pool, sequence in zip(self.pools, self.running[data.draw(self.any_of(self.running))], strict=True):
            blocks = sequence.logical_blocks.get_real_blocks()[start : start + length].copy()
            pool.blocks.pin_logical_blocks(blocks)
            leased.append(blocks)
        self.leases.append(leased)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        for pool, blocks in zip(self.pools, self.leases.pop(data.draw(self.any_of(self.leases))), strict=True):
            pool.blocks.release_logical_blocks(blocks)

    @rule(wanted=st.integers(0, 25))
    def evict(self, wanted: int) -> None:
        for pool in self.pools:
            expected = min(wanted, evictable(pool))
            assert pool.trie.evict(wanted) == expected

    @precondition(lambda self: nodes(self.ours))
    @rule(data=st.data())
    def take_out(self, data: st.DataObject) -> None:
        place = data.draw(self.any_of(list(nodes(self.ours))))
        taken = [take_out(pool.trie, [sorted(nodes(pool), key=_tokens)[place]]) for pool in self.pools]
        assert len(set(taken)) == 1

    @invariant()
    def the_books_are_right(self) -> None:
        for place, pool in enumerate(self.pools):
            check(pool)
            counts = pool.trie.allocator._log_mem.ref_count
            for pair in self.running:
                assert (counts[pair[place].logical_blocks.get_real_blocks()] >= 1).all()
            if not self.running and not self.leases:
                assert pool.free + len(nodes(pool)) == 20

    @invariant()
    def both_hold_the_same(self) -> None:
        held = [sorted(map(_tokens, nodes(pool))) for pool in self.pools]
        assert held[0] == held[1]

    @staticmethod
    def any_of(things: list[Any]) -> st.SearchStrategy[int]:
        return st.integers(0, len(things) - 1)


class LateWorkload(Workload):
    """The same while the first pool's policy is told of things later, now and then: it chooses what it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        eviction(self.ours).deferral = Deferral(lambda: self.now_s)

    @rule(for_s=st.sampled_from((0.01, 0.1, 0.25)))
    def deferral(self, for_s: float) -> None:
        eviction(self.ours).defer(for_s)

    @rule()
    def time_passes(self) -> None:
        self.now_s += 0.1
        eviction(self.ours).settle()

    @invariant()
    def the_books_are_right(self) -> None:
        if not eviction(self.ours).deferral:  # looking into them settles them
            super().the_books_are_right()

    def teardown(self) -> None:
        check(self.ours)


class AnyPolicy(Workload):
    """The same with any policy that ships in one pool; which blocks it holds is its own affair."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.pools = (self.ours,)
        self.next_name = ""
        eviction(self.ours).swap(make_policy(self.name, capacity_blocks=20))

    @invariant()
    def both_hold_the_same(self) -> None:
        assert eviction(self.ours).policy.name == self.name

    @rule(name=st.sampled_from(list(POLICIES)))
    def swap(self, name: str) -> None:
        before = {node.block_id for node in nodes(self.ours)}
        self.name = name
        eviction(self.ours).swap(make_policy(name, capacity_blocks=20))
        assert {node.block_id for node in nodes(self.ours)} == before

    @rule(name=st.sampled_from(list(POLICIES)))
    def begin_to_swap(self, name: str) -> None:
        eviction(self.ours).begin_swap(make_policy(name, capacity_blocks=20))
        self.next_name = name

    @precondition(lambda self: eviction(self.ours).has_successor)
    @rule(blocks=st.integers(1, 5))
    def go_on_swapping(self, blocks: int) -> None:
        known = eviction(self.ours).resident_blocks
        assert 0 <= eviction(self.ours).continue_swap(blocks) <= known

    @precondition(lambda self: eviction(self.ours).has_successor)
    @rule()
    def end_swapping(self) -> None:
        before = {node.block_id for node in nodes(self.ours)}
        eviction(self.ours).end_swap()
        self.name = self.next_name
        assert {node.block_id for node in nodes(self.ours)} == before


def _tokens(node: Any) -> tuple[int, ...]:
    return tuple(token for step in node.path_from_root() for token in step.token_ids)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_up_leaves_that_nobody_uses_and_all_of_them_also_when_it_is_swapped(name: str) -> None:
    machine = type("Machine", (AnyPolicy,), {"name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(12), stateful_step_count=30, deadline=None)
    )


@pytest.mark.hypothesis
def test_what_is_told_later_changes_no_choice() -> None:
    run_state_machine_as_test(
        LateWorkload, settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
    )


@pytest.mark.hypothesis
def test_any_workload_leaves_the_books_right_and_the_order_that_of_the_naive_twin() -> None:
    run_state_machine_as_test(
        Workload, settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
    )
