"""The fleet index says exactly what the naive one says, whatever happens to it."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcontrol.core import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, CacheTier, InstanceId, KvEvent
from kvcontrol.prefix_reuse import FleetIndex, NaiveFleetIndex, PrefixMatch, ResidencyIndex

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


def chain(name: int, length: int = 10) -> list[BlockHash]:
    return [BlockHash(bytes([name, depth]) * 8) for depth in range(length)]


BLOCKS = chain(1)
OTHER = [*BLOCKS[:3], *chain(2)[3:]]
"""A prompt that shares its first three blocks with ``BLOCKS``."""

implementations = pytest.mark.parametrize("make", [FleetIndex, NaiveFleetIndex])
Make = Callable[[], ResidencyIndex]


def parent_of(block: BlockHash) -> BlockHash | None:
    for prompt in (BLOCKS, OTHER):
        if block in prompt:
            place = prompt.index(block)
            return prompt[place - 1] if place else None
    raise AssertionError(block)


def stored(*blocks: BlockHash, tier: CacheTier = CacheTier.HBM) -> KvEvent:
    return BlockStored(block_hashes=blocks, parent=parent_of(blocks[0]), token_ids=(), block_size_tokens=16, tier=tier)


def removed(*blocks: BlockHash, tier: CacheTier = CacheTier.HBM) -> KvEvent:
    return BlockRemoved(block_hashes=blocks, tier=tier)


def with_parents(blocks: list[BlockHash]) -> list[tuple[BlockHash, BlockHash | None]]:
    return [(block, parent_of(block)) for block in blocks]


@implementations
def test_the_match_is_the_leading_run_and_not_what_lies_behind_a_hole(make: Make) -> None:
    index = make()
    index.apply(A, stored(*BLOCKS[:3]))
    index.apply(B, stored(BLOCKS[0]))
    index.apply(B, stored(BLOCKS[2]))
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
    index.reset(A, {CacheTier.HBM: with_parents(BLOCKS[:1]), CacheTier.NVME: with_parents(BLOCKS[1:3])})
    assert index.blocks_held(A) == {CacheTier.HBM: 1, CacheTier.NVME: 2}
    assert index.match(BLOCKS)[A].blocks == 3


@implementations
def test_clearing_takes_every_tier(make: Make) -> None:
    index = make()
    index.apply(A, stored(*BLOCKS[:2]))
    index.apply(A, stored(*BLOCKS[:2], tier=CacheTier.DDR))
    index.apply(A, AllBlocksCleared())
    assert index.match(BLOCKS) == {}
    assert index.blocks_held(A) == {}


def test_the_slowest_tier_of_an_empty_run_is_none() -> None:
    assert PrefixMatch(blocks=0, by_tier={}).slowest_tier is None


@pytest.mark.parametrize(
    "break_it",
    [stored(*BLOCKS[5:7]), removed(BLOCKS[1])],
    ids=["a block without its parent", "a parent that leaves before its child"],
)
def test_an_instance_with_a_hole_is_walked_until_a_snapshot_makes_it_whole(break_it: KvEvent) -> None:
    index = FleetIndex()
    index.apply(A, stored(*BLOCKS[:3]))
    assert not index.is_ragged(A)
    index.apply(A, break_it)
    assert index.is_ragged(A)
    index.reset(A, {CacheTier.HBM: with_parents(BLOCKS[:3])})
    assert not index.is_ragged(A)
    assert index.match(BLOCKS)[A].blocks == 3


def test_tails_that_leave_before_heads_keep_an_instance_whole() -> None:
    index = FleetIndex()
    index.apply(A, stored(*BLOCKS))
    index.apply(A, removed(*BLOCKS[:3:-1]))
    assert not index.is_ragged(A)
    assert index.match(BLOCKS)[A].blocks == 4


def test_a_peer_that_claims_another_parent_for_a_block_misleads_nobody_else() -> None:
    index = FleetIndex()
    index.apply(A, BlockStored(block_hashes=(BLOCKS[3],), parent=None, token_ids=(), block_size_tokens=16))
    index.apply(B, stored(*BLOCKS[:4]))
    assert index.match(BLOCKS) == {B: PrefixMatch(blocks=4, by_tier={CacheTier.HBM: 4})}


def test_what_a_lost_instance_held_is_swept_out_by_later_stores() -> None:
    index = FleetIndex()
    index.apply(A, stored(*BLOCKS))
    index.drop(A)
    index.apply(B, stored(*OTHER))
    index.apply(C, stored(BLOCKS[0]))
    index.check_integrity()
    assert not index._retired
    assert BLOCKS[9] not in index._holders
    assert set(index.match(BLOCKS)) == {B, C}


def test_clearing_again_and_again_uses_nothing_up() -> None:
    index = FleetIndex()
    for _ in range(1_000):
        index.apply(A, AllBlocksCleared())
        index.reset(B, {})
        index.drop(B)
    index.check_integrity()
    assert index._places <= 4


def test_a_liar_about_parents_in_a_lower_tier_breaks_nothing() -> None:
    index = FleetIndex()
    index.apply(A, stored(BLOCKS[0]))
    lie = BlockStored(
        block_hashes=(BLOCKS[2],), parent=BLOCKS[0], token_ids=(), block_size_tokens=16, tier=CacheTier.DDR
    )
    index.apply(A, lie)
    index.apply(B, stored(*BLOCKS[:2]))
    found = dict(index.match(BLOCKS[:3]))
    assert found[B].blocks == 2
    assert sum(found[A].by_tier.values()) == found[A].blocks


def test_more_instances_than_bits_in_a_machine_word_are_told_apart() -> None:
    index = FleetIndex()
    names = [InstanceId(f"engine-{place}") for place in range(150)]
    for depth, name in enumerate(names):
        index.apply(name, stored(*BLOCKS[: depth % 10 + 1]))
    found = index.match(BLOCKS)
    assert {name: match.blocks for name, match in found.items()} == {
        name: depth % 10 + 1 for depth, name in enumerate(names)
    }


instances = st.sampled_from([A, B, C])
tiers = st.sampled_from(list(CacheTier))
runs = st.tuples(st.sampled_from([BLOCKS, OTHER]), st.integers(0, 9), st.integers(1, 10)).map(
    lambda run: tuple(run[0][run[1] : run[1] + run[2]])
)
prompts = st.sampled_from([BLOCKS, OTHER, BLOCKS[:4], [], [*BLOCKS, BlockHash(b"unheard of")]])


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
        self._both(instance, removed(*blocks, tier=tier))

    @rule(instance=instances)
    def clear(self, instance: InstanceId) -> None:
        self._both(instance, AllBlocksCleared())

    @rule(instance=instances, blocks=runs, tier=tiers)
    def reset(self, instance: InstanceId, blocks: tuple[BlockHash, ...], tier: CacheTier) -> None:
        for index in (self.index, self.oracle):
            index.reset(instance, {tier: with_parents(list(blocks))})

    @rule(instance=instances, blocks=runs, tier=tiers)
    def extend(self, instance: InstanceId, blocks: tuple[BlockHash, ...], tier: CacheTier) -> None:
        for index in (self.index, self.oracle):
            index.extend(instance, tier, with_parents(list(blocks)))

    @rule(instance=instances)
    def drop(self, instance: InstanceId) -> None:
        self.index.drop(instance)
        self.oracle.drop(instance)

    @invariant()
    def says_the_same(self) -> None:
        self.index.check_integrity()
        for instance in (A, B, C):
            assert self.index.blocks_held(instance) == self.oracle.blocks_held(instance)
        for prompt in (BLOCKS, OTHER, BLOCKS[:4], [*BLOCKS, BlockHash(b"unheard of")]):
            ours, theirs = self.index.match(prompt), self.oracle.match(prompt)
            assert {name: match.blocks for name, match in ours.items()} == {
                name: match.blocks for name, match in theirs.items()
            }
            assert all(sum(match.by_tier.values()) == match.blocks for match in ours.values())

    def _both(self, instance: InstanceId, event: KvEvent) -> None:
        self.index.apply(instance, event)
        self.oracle.apply(instance, event)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


class TieredMachine(RuleBasedStateMachine):
    """With tails demoted before heads, the split between tiers is exact too."""

    def __init__(self) -> None:
        super().__init__()
        self.index = FleetIndex()
        self.oracle = NaiveFleetIndex()
        self.depth = dict.fromkeys(CacheTier, 0)

    @rule(tier=tiers, depth=st.integers(0, 10))
    def reach(self, tier: CacheTier, depth: int) -> None:
        """Let a tier hold the first ``depth`` blocks."""
        now = self.depth[tier]
        for index in (self.index, self.oracle):
            if depth > now:
                index.apply(A, stored(*BLOCKS[now:depth], tier=tier))
            elif depth < now:
                index.apply(A, removed(*BLOCKS[depth:now][::-1], tier=tier))
        self.depth[tier] = depth

    @invariant()
    def says_the_same(self) -> None:
        self.index.check_integrity()
        assert not self.index.is_ragged(A)
        assert self.index.match(BLOCKS) == self.oracle.match(BLOCKS)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.mark.slow
def test_ten_million_blocks_of_a_fleet_are_held_matched_and_dropped() -> None:
    index = FleetIndex()
    names = [InstanceId(f"engine-{place}") for place in range(10)]
    for place in range(10_000):
        blocks = tuple(BlockHash((place << 16 | depth).to_bytes(16, "big")) for depth in range(1_000))
        index.apply(
            names[place % 10],
            BlockStored(block_hashes=blocks, parent=None, token_ids=(), block_size_tokens=64),
        )
    last = [BlockHash((9_999 << 16 | depth).to_bytes(16, "big")) for depth in range(1_000)]
    assert {name: match.blocks for name, match in index.match(last).items()} == {names[9]: 1_000}
    assert sum(index.blocks_held(name)[CacheTier.HBM] for name in names) == 10_000_000
    index.drop(names[9])
    assert index.match(last) == {}
