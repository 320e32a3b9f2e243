"""The fleet index says exactly what the naive one says, whatever happens to it."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcontrol.core import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, CacheTier, InstanceId, KvEvent
from kvcontrol.prefix_reuse import FleetIndex, NaiveFleetIndex, PrefixMatch, ResidencyIndex

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
BLOCKS = [BlockHash(bytes([n]) * 16) for n in range(12)]

instances = st.sampled_from([A, B, C])
tiers = st.sampled_from(list(CacheTier))
prompts = st.lists(st.sampled_from(BLOCKS), max_size=12)
runs = st.tuples(st.integers(0, 11), st.integers(1, 12)).map(lambda r: tuple(BLOCKS[r[0] : r[0] + r[1]]))

implementations = pytest.mark.parametrize("make", [FleetIndex, NaiveFleetIndex])
Make = Callable[[], ResidencyIndex]


def stored(*blocks: BlockHash, tier: CacheTier = CacheTier.HBM) -> KvEvent:
    return BlockStored(block_hashes=blocks, parent=None, token_ids=(), block_size_tokens=16, tier=tier)


@implementations
def test_the_match_is_the_leading_run_and_not_what_lies_behind_a_hole(make: Make) -> None:
    index = make()
    index.apply(A, stored(*BLOCKS[:3]))
    index.apply(B, stored(BLOCKS[0], BLOCKS[2]))
    index.apply(C, stored(*BLOCKS[1:3]))
    assert index.match(BLOCKS[:4]) == {
        A: PrefixMatch(blocks=3, by_tier={CacheTier.HBM: 3}),
        B: PrefixMatch(blocks=1, by_tier={CacheTier.HBM: 1}),
    }


@implementations
def test_a_block_counts_in_its_fastest_tier_only(make: Make) -> None:
    index = make()
    index.apply(A, stored(*BLOCKS[:4], tier=CacheTier.DDR))
    index.apply(A, stored(*BLOCKS[:2]))
    (match,) = index.match(BLOCKS).values()
    assert match == PrefixMatch(blocks=4, by_tier={CacheTier.HBM: 2, CacheTier.DDR: 2})
    assert match.slowest_tier is CacheTier.DDR


@implementations
def test_an_empty_prompt_matches_nobody(make: Make) -> None:
    index = make()
    index.apply(A, stored(BLOCKS[0]))
    assert index.match([]) == {}


@implementations
def test_a_dropped_instance_is_gone_and_one_that_takes_its_place_starts_empty(make: Make) -> None:
    index = make()
    index.apply(A, stored(*BLOCKS[:2]))
    index.drop(A)
    index.drop(A)
    index.apply(B, stored(BLOCKS[0]))
    assert index.match(BLOCKS) == {B: PrefixMatch(blocks=1, by_tier={CacheTier.HBM: 1})}
    assert index.blocks_held(A) == {}


@implementations
def test_a_snapshot_replaces_what_was_known(make: Make) -> None:
    index = make()
    index.apply(A, stored(*BLOCKS[:5]))
    index.reset(A, {CacheTier.HBM: BLOCKS[:1], CacheTier.NVME: BLOCKS[1:3]})
    assert index.blocks_held(A) == {CacheTier.HBM: 1, CacheTier.NVME: 2}
    assert index.match(BLOCKS)[A].blocks == 3


def test_the_slowest_tier_of_an_empty_run_is_none() -> None:
    assert PrefixMatch(blocks=0, by_tier={}).slowest_tier is None


class FleetMachine(RuleBasedStateMachine):
    """Any order of events, snapshots and drops leaves both indexes with the same answers."""

    def __init__(self) -> None:
        super().__init__()
        self.index = FleetIndex()
        self.oracle = NaiveFleetIndex()

    @rule(instance=instances, blocks=runs, tier=tiers)
    def store(self, instance: InstanceId, blocks: tuple[BlockHash, ...], tier: CacheTier) -> None:
        self._both(instance, stored(*blocks, tier=tier))

    @rule(instance=instances, blocks=runs, tier=tiers)
    def remove(self, instance: InstanceId, blocks: tuple[BlockHash, ...], tier: CacheTier) -> None:
        self._both(instance, BlockRemoved(block_hashes=blocks, tier=tier))

    @rule(instance=instances)
    def clear(self, instance: InstanceId) -> None:
        self._both(instance, AllBlocksCleared())

    @rule(instance=instances, blocks=runs, tier=tiers)
    def reset(self, instance: InstanceId, blocks: tuple[BlockHash, ...], tier: CacheTier) -> None:
        for index in (self.index, self.oracle):
            index.reset(instance, {tier: blocks})

    @rule(instance=instances)
    def drop(self, instance: InstanceId) -> None:
        self.index.drop(instance)
        self.oracle.drop(instance)

    @rule(prompt=prompts)
    def match(self, prompt: list[BlockHash]) -> None:
        assert self.index.match(prompt) == self.oracle.match(prompt)

    @rule(start=st.integers(0, 11))
    def match_chain(self, start: int) -> None:
        assert self.index.match(BLOCKS[start:]) == self.oracle.match(BLOCKS[start:])

    @invariant()
    def holds_the_same(self) -> None:
        self.index.check_integrity()
        for instance in (A, B, C):
            assert self.index.blocks_held(instance) == self.oracle.blocks_held(instance)

    def _both(self, instance: InstanceId, event: KvEvent) -> None:
        self.index.apply(instance, event)
        self.oracle.apply(instance, event)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(instances, runs, tiers), max_size=20), prompts)
def test_by_tier_adds_up_to_blocks(
    history: list[tuple[InstanceId, tuple[BlockHash, ...], CacheTier]], prompt: list[BlockHash]
) -> None:
    index = FleetIndex()
    for instance, blocks, tier in history:
        index.apply(instance, stored(*blocks, tier=tier))
    for match in index.match(prompt).values():
        assert match.blocks == sum(match.by_tier.values())
        assert 0 < match.blocks <= len(prompt)
