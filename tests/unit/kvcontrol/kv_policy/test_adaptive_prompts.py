"""Told of prompts, the adaptive policy never finds less of their tokens than it promises, whatever comes."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import AdaptivePolicy, EvictionPolicy, LruPolicy, PolicyContext
from kvcontrol.kv_policy.adaptive import RISK
from lab.bench.policies.adversaries import HABITS, Workload
from lab.traces import Request
from tests.support.examples import examples


class Cache:
    """Serves prompts as a replay does, and counts the tokens found."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy, self.capacity = policy, capacity
        self.resident: set[int] = set()
        self.found = 0

    def serve(self, request: Request) -> None:
        ids = request.block_ids.tolist()
        self.policy.requested(ids, block_tokens=request.block_tokens, prompt_tokens=request.prompt_tokens)
        leading = next((place for place, block in enumerate(ids) if block not in self.resident), len(ids))
        self.found += min(leading * request.block_tokens, request.prompt_tokens)
        for block in reversed(ids):
            path = (BlockId(block),)
            if block in self.resident:
                self.policy.access(path)
                continue
            if len(self.resident) >= self.capacity:
                context = PolicyContext(
                    tier=CacheTier.HBM,
                    wanted_blocks=1,
                    used_blocks=self.capacity,
                    capacity_blocks=self.capacity,
                    incoming=path,
                )
                self.resident.difference_update(self.policy.select_victims(context).victims)
            self.policy.insert(path, path)
            self.resident.add(block)


class Engine(Cache):
    """Serves prompts as an engine does: what it has is used, then all blocks that it lacks get room at once."""

    def serve(self, request: Request) -> None:
        ids = list(dict.fromkeys(request.block_ids.tolist()))[: self.capacity]
        self.policy.requested(ids, block_tokens=request.block_tokens, prompt_tokens=request.prompt_tokens)
        leading = next((place for place, block in enumerate(ids) if block not in self.resident), len(ids))
        self.found += min(leading * request.block_tokens, request.prompt_tokens)
        there = [BlockId(block) for block in ids if block in self.resident]
        fresh = [BlockId(block) for block in ids if block not in self.resident]
        self.policy.hold(there)
        self.policy.access(there)
        short = len(self.resident) + len(fresh) - self.capacity
        if short > 0:
            context = PolicyContext(
                tier=CacheTier.HBM,
                wanted_blocks=short,
                used_blocks=len(self.resident),
                capacity_blocks=self.capacity,
                incoming=fresh,
            )
            self.resident.difference_update(self.policy.select_victims(context).victims)
        self.policy.insert(fresh, fresh)
        self.resident.update(fresh)
        self.policy.release(there)


def side_by_side(requests: Sequence[Request], capacity: int, kind: type[Cache] = Cache) -> tuple[Cache, Cache]:
    """Serve all, hold it to its promise at every prompt and its ghost to a real LRU cache."""
    policy = AdaptivePolicy(capacity)
    lru, ours = kind(LruPolicy(), capacity), kind(policy, capacity)
    for request in requests:
        lru.serve(request)
        ours.serve(request)
        assert ours.found >= (1 - RISK) * lru.found
        state = policy.state()
        assert (state.hits, state.lru_hits) == (ours.found, lru.found), "its ghost is not LRU"
        assert state.behind_blocks == len(lru.resident - ours.resident)
    return lru, ours


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("capacity", [8, 60])
def test_in_every_habit_it_keeps_its_promise_at_every_prompt(habit: str, capacity: int) -> None:
    workload = Workload(Random(capacity), capacity)  # noqa: S311 - reproducible, not secret
    workload.popular = [workload._new(max(1, capacity // 10)) for _ in range(20)]
    side_by_side([workload.request(HABITS[habit](workload)) for _ in range(150)], capacity)


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 1 << 32), capacity=st.sampled_from([1, 3, 8, 20, 50]), count=st.integers(1, 120))
def test_whatever_habits_follow_each_other_it_keeps_its_promise(seed: int, capacity: int, count: int) -> None:
    side_by_side(Workload(Random(seed), capacity).requests(count), capacity)  # noqa: S311


@pytest.mark.slow
@settings(max_examples=examples(400), deadline=None)
@given(seed=st.integers(0, 1 << 32), capacity=st.sampled_from([3, 8, 20, 50, 100, 200, 400]), count=st.integers(1, 900))
def test_whatever_habits_follow_each_other_for_long_it_keeps_its_promise(seed: int, capacity: int, count: int) -> None:
    side_by_side(Workload(Random(seed), capacity).requests(count), capacity)  # noqa: S311


def test_it_gains_tokens_where_few_prompts_are_popular() -> None:
    capacity = 60
    workload = Workload(Random(2), capacity)  # noqa: S311
    workload.popular = [workload._new(6) for _ in range(20)]
    lru, ours = side_by_side([workload.request(workload.few()) for _ in range(1_500)], capacity)
    assert ours.found > 1.1 * lru.found


def test_room_for_a_whole_prompt_at_once_costs_none_of_what_is_gained() -> None:
    capacity = 60
    workload = Workload(Random(2), capacity)  # noqa: S311
    workload.popular = [workload._new(6) for _ in range(20)]
    requests = [workload.request(workload.few()) for _ in range(1_500)]
    lru, ours = side_by_side(requests, capacity, Engine)
    assert ours.found > 1.1 * lru.found


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 1 << 32), capacity=st.sampled_from([3, 8, 20, 50]), count=st.integers(1, 120))
def test_an_engine_that_makes_room_for_whole_prompts_is_promised_as_much(seed: int, capacity: int, count: int) -> None:
    policy = AdaptivePolicy(capacity)
    lru, ours = Engine(LruPolicy(), capacity), Engine(policy, capacity)
    for request in Workload(Random(seed), capacity).requests(count):  # noqa: S311
        lru.serve(request)
        ours.serve(request)
        assert ours.found >= (1 - RISK) * lru.found


def test_a_prompt_that_pushes_its_own_blocks_out_is_lrus_to_the_token() -> None:
    session = list(range(40))
    prompts = [session[:length] for length in (10, 20, 30, 40)]
    workload = Workload(Random(0), 16)  # noqa: S311
    lru, ours = side_by_side([workload.request(ids) for ids in prompts * 10], 16)
    assert ours.found == lru.found > 0


def test_prompts_whose_blocks_are_not_chained_make_it_careful() -> None:
    rng = Random(5)  # noqa: S311
    capacity = 30
    workload = Workload(rng, capacity)
    lru, ours = Cache(LruPolicy(), capacity), Cache(AdaptivePolicy(capacity), capacity)
    for request in workload.requests(600):
        ids = request.block_ids.tolist()
        rng.shuffle(ids)
        mixed = workload.request(ids)
        lru.serve(mixed)
        ours.serve(mixed)
    assert ours.found >= 0.99 * lru.found


def test_a_prompt_of_which_not_all_comes_stays_behind() -> None:
    policy = AdaptivePolicy(4)
    policy.insert([BlockId(1), BlockId(2)], ["a", "b"])
    context = PolicyContext(tier=CacheTier.HBM, wanted_blocks=1, used_blocks=2, capacity_blocks=4)
    policy.select_victims(context)
    assert policy.state().behind_blocks == 1
    policy.requested(["a", "b"], block_tokens=4, prompt_tokens=8)
    assert (policy.state().hits, policy.state().lru_hits, policy.state().behind_blocks) == (4, 8, 0)
    policy.requested(["z"], block_tokens=4, prompt_tokens=4)
    assert policy.state().behind_blocks == 1
