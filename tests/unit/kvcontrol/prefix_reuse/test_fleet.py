"""The fleet index says exactly what the naive one says, whatever happens to it."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcontrol.core import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, CacheTier, InstanceId, KvEvent
from kvcontrol.prefix_reuse import FleetIndex, PrefixMatch, ResidencyIndex, Run
from lab.research.prefix_index.naive_fleet import NaiveFleetIndex
from tests.support.examples import examples
from tests.support.work import steps

A, B, C, LIAR = InstanceId("a"), InstanceId("b"), InstanceId("c"), InstanceId("liar")


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


HEALED: dict[str, tuple[list[KvEvent], list[KvEvent], int]] = {
    "the hole is filled": ([stored(*BLOCKS[5:7])], [stored(*BLOCKS[3:5])], 7),
    "what lies behind it leaves": ([stored(*BLOCKS[5:7])], [removed(*BLOCKS[5:7])], 3),
    "what left is stored again": ([removed(BLOCKS[1])], [stored(BLOCKS[1])], 3),
    "it comes back in another tier": ([removed(BLOCKS[1])], [stored(BLOCKS[1], tier=CacheTier.DDR)], 3),
    "all leaves, heads first": ([removed(BLOCKS[0])], [removed(*BLOCKS[1:3])], 0),
    "all is cleared": ([removed(BLOCKS[0])], [AllBlocksCleared()], 0),
    "two holes are filled": ([stored(BLOCKS[8]), removed(BLOCKS[0])], [stored(BLOCKS[0]), stored(*BLOCKS[3:8])], 9),
}


@pytest.mark.parametrize(("broken", "healed", "blocks"), HEALED.values(), ids=HEALED)
def test_an_instance_with_a_hole_is_walked_until(broken: list[KvEvent], healed: list[KvEvent], blocks: int) -> None:
    index = FleetIndex()
    index.apply(A, stored(*BLOCKS[:3]))
    for event in broken:
        index.apply(A, event)
    assert index.is_ragged(A)
    for event in healed:
        assert index.is_ragged(A)
        index.apply(A, event)
        index.check_integrity()
    assert not index.is_ragged(A)
    assert sum(match.blocks for match in index.match(BLOCKS).values()) == blocks


def test_a_snapshot_makes_an_instance_whole() -> None:
    index = FleetIndex()
    index.apply(A, stored(*BLOCKS[5:7]))
    assert index.is_ragged(A)
    index.reset(A, {CacheTier.HBM: with_parents(BLOCKS[:3])})
    assert not index.is_ragged(A)


@pytest.mark.parametrize("stays", [True, False], ids=["stays", "leaves"])
def test_one_that_lies_about_a_parent_first_makes_nobody_else_ragged(stays: bool) -> None:  # noqa: FBT001 - a parameter
    names = [InstanceId(f"engine-{place}") for place in range(64)]
    work = []
    for lied in (False, True):
        index = FleetIndex()
        if lied:
            for place, block in enumerate(BLOCKS[1:]):
                index.extend(LIAR, CacheTier.HBM, [(block, BlockHash(bytes([place]) * 16))])
            assert index.is_ragged(LIAR)
        for name in names:
            index.apply(name, stored(*BLOCKS))
        if not stays:
            index.drop(LIAR)
        assert not any(index.is_ragged(name) for name in names)
        index.check_integrity()
        for _ in index.sweep():
            pass
        assert {name: match.blocks for name, match in index.match(BLOCKS).items()} == dict.fromkeys(names, 10)
        work.append(steps(lambda index=index: dict(index.match(BLOCKS))))  # type: ignore[misc]
        for name in names:
            index.apply(name, removed(*BLOCKS[::-1]))
            assert not index.is_ragged(name)
        index.check_integrity()
    assert work[0] == work[1]


@pytest.mark.parametrize("parent", [BLOCKS[3], None, BLOCKS[9]], ids=["itself", "nothing", "its own grandchild"])
def test_an_instance_that_contradicts_itself_keeps_the_tables_true(parent: BlockHash | None) -> None:
    index = FleetIndex()
    index.extend(A, CacheTier.HBM, [(BLOCKS[3], parent), (BLOCKS[8], BLOCKS[3]), (BLOCKS[9], BLOCKS[8])])
    index.extend(A, CacheTier.DDR, [(BLOCKS[3], BLOCKS[2]), (BLOCKS[9], None)])
    index.check_integrity()
    index.apply(B, stored(*BLOCKS))
    assert index.match(BLOCKS)[B].blocks == 10
    for tier in (CacheTier.HBM, CacheTier.DDR):
        for block in (BLOCKS[3], BLOCKS[9], BLOCKS[8]):
            index.apply(A, removed(block, tier=tier))
            index.check_integrity()
    assert not index.is_ragged(A)
    assert index.blocks_held(A) == {}


WRONG: dict[str, tuple[object, object]] = {
    "a tier that is none": ("TAPE", [(BLOCKS[0], None)]),
    "no tier": (None, [(BLOCKS[0], None)]),
    "text for a block": (CacheTier.HBM, [(BLOCKS[0], None), ("text", None)]),
    "a list for a block": (CacheTier.HBM, [(BLOCKS[0], None), ([], None)]),
    "a list for a parent": (CacheTier.HBM, [(BLOCKS[0], None), (BLOCKS[1], [])]),
    "a number for a parent": (CacheTier.HBM, [(BLOCKS[0], None), (BLOCKS[1], 7)]),
    "no pairs": (CacheTier.HBM, [(BLOCKS[0], None), 7]),
    "pairs of three": (CacheTier.HBM, [(BLOCKS[0], None), (BLOCKS[1], None, None)]),
}


@pytest.mark.parametrize(("tier", "blocks"), WRONG.values(), ids=WRONG)
def test_what_is_no_block_is_refused_and_the_tables_stay_true(
    tier: CacheTier, blocks: list[tuple[BlockHash, BlockHash | None]]
) -> None:
    index = FleetIndex()
    index.apply(A, stored(*BLOCKS[2:4]))
    with pytest.raises((TypeError, ValueError)):
        index.extend(A, tier, blocks)
    index.check_integrity()
    assert index.blocks_held(A)[CacheTier.HBM] in {2, 3}
    index.drop(A)
    for _ in index.sweep():
        index.check_integrity()
    assert not index._holders


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


CALLS: dict[str, Callable[[FleetIndex], object]] = {
    "matches": lambda index: index.match(BLOCKS),
    "matches of nothing": lambda index: index.match([]),
    "removals": lambda index: index.apply(B, removed(OTHER[9])),
    "drops": lambda index: index.drop(C),
    "snapshots of nothing": lambda index: index.reset(B, {}),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_a_lost_instance_held_is_swept_out_in_bounded_steps_by(call: Callable[[FleetIndex], object]) -> None:
    index = FleetIndex()
    many = [(BlockHash(place.to_bytes(16, "big")), None) for place in range(5_000)]
    index.extend(A, CacheTier.HBM, many)
    index.drop(A)
    left = [len(index._holders)]
    while left[-1]:
        call(index)
        left.append(len(index._holders))
        assert 0 < left[-2] - left[-1] <= 64
    index.check_integrity()
    assert not index._parent
    assert not index._retired


def test_sweeping_takes_everything_out_in_bounded_steps() -> None:
    index = FleetIndex()
    index.extend(A, CacheTier.HBM, [(BlockHash(place.to_bytes(16, "big")), None) for place in range(5_000)])
    index.apply(B, stored(*BLOCKS))
    index.drop(A)
    left = [len(index._holders)]
    for _ in index.sweep():
        left.append(len(index._holders))
        index.check_integrity()
    assert max(before - after for before, after in pairwise(left)) <= 512
    assert left[-1] == len(BLOCKS)


def test_an_answer_stays_right_while_others_look_up_and_sweep() -> None:
    index = FleetIndex()
    index.extend(A, CacheTier.HBM, [(BlockHash(place.to_bytes(16, "big")), None) for place in range(500)])
    index.apply(A, stored(*BLOCKS))
    index.apply(B, stored(*BLOCKS[:4]))
    index.drop(A)
    answer = index.match(BLOCKS)
    while index._retired:
        index.match(BLOCKS)
        assert {name: match.blocks for name, match in answer.items()} == {B: 4}


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

    @rule(block=st.sampled_from([*BLOCKS, *OTHER]), parent=st.none() | st.sampled_from([*BLOCKS, *OTHER]), tier=tiers)
    def lie(self, block: BlockHash, parent: BlockHash | None, tier: CacheTier) -> None:
        """A fourth instance says anything about parents; it is nobody's business but its own."""
        self.index.extend(LIAR, tier, [(block, parent)])

    @rule(block=st.sampled_from([*BLOCKS, *OTHER]), tier=tiers)
    def take_back(self, block: BlockHash, tier: CacheTier) -> None:
        self.index.apply(LIAR, removed(block, tier=tier))

    @rule()
    def drop_the_liar(self) -> None:
        self.index.drop(LIAR)

    @invariant()
    def says_the_same(self) -> None:
        self.index.check_integrity()
        for instance in (A, B, C):
            held = {block for blocks in self.oracle._held.get(instance, {}).values() for block in blocks}
            assert self.index.is_ragged(instance) == bool({parent_of(block) for block in held} - held - {None})
            assert self.index.blocks_held(instance) == self.oracle.blocks_held(instance)
        for prompt in (BLOCKS, OTHER, BLOCKS[:4], [*BLOCKS, BlockHash(b"unheard of")]):
            ours, theirs = dict(self.index.match(prompt)), self.oracle.match(prompt)
            assert by_name(self.index.runs(prompt)) == ours
            ours.pop(LIAR, None)
            assert {name: match.blocks for name, match in ours.items()} == {
                name: match.blocks for name, match in theirs.items()
            }
            assert all(sum(match.by_tier.values()) == match.blocks for match in ours.values())

    def _both(self, instance: InstanceId, event: KvEvent) -> None:
        self.index.apply(instance, event)
        self.oracle.apply(instance, event)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


def by_name(runs: list[Run]) -> dict[InstanceId, PrefixMatch]:
    named = [(name, PrefixMatch(blocks=blocks, by_tier=by_tier)) for blocks, by_tier, names in runs for name in names]
    assert len(dict(named)) == len(named), "somebody comes twice"
    return dict(named)


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
        assert by_name(self.index.runs(BLOCKS)) == self.oracle.match(BLOCKS)


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(max_examples=examples(60), stateful_step_count=20, deadline=None)


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


def test_a_blocks_lineage_is_all_that_somebody_holds_of_what_comes_before_it() -> None:
    index = FleetIndex()
    index.reset(A, {CacheTier.HBM: with_parents(BLOCKS[:4])})
    index.reset(B, {CacheTier.DDR: with_parents(BLOCKS[:6])})
    assert index.lineage(BLOCKS[5]) == BLOCKS[:6]
    assert index.lineage(BLOCKS[0]) == BLOCKS[:1]
    assert index.lineage(BLOCKS[6]) == []
    index.drop(B)
    assert index.lineage(BLOCKS[5]) == []
    index.apply(A, removed(BLOCKS[1]))
    assert index.lineage(BLOCKS[3]) == BLOCKS[2:4]


def test_a_lineage_that_turns_in_a_circle_ends() -> None:
    index = FleetIndex()
    index.reset(LIAR, {CacheTier.HBM: [(BLOCKS[0], BLOCKS[1]), (BLOCKS[1], BLOCKS[0])]})
    assert index.lineage(BLOCKS[1]) == BLOCKS[:2]
