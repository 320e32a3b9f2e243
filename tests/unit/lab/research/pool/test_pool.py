"""A pool keeps every block free, pinned or cached, evicts on the allocation path what its policy says, and no more."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcontrol.core.blocks import CacheTier, KVFormat
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import LruPolicy
from kvcontrol.kv_runtime import AllocationError, NoSpace, Shortage
from lab.research.pool.defrag import Compactor, Relocation
from lab.research.pool.naive import NaivePool, NaiveUnits
from lab.research.pool.pool import DISCARDED, FREED, AllocationResult, KVPool
from lab.research.pool.space import BlockRegion, BlockSpace, BlockSpec, SlotSpace
from tests.support.examples import examples

KIB = 1024
BF16 = BlockSpec(kv_format=KVFormat.BF16, tokens=64, size_bytes=4 * KIB)
FP8 = BlockSpec(kv_format=KVFormat.FP8, tokens=64, size_bytes=2 * KIB)
INT4 = BlockSpec(kv_format=KVFormat.INT4, tokens=64, size_bytes=KIB)


class Evictions:
    """What a pool said that it evicted, and what ended because its owner wanted so."""

    def __init__(self) -> None:
        self.blocks: list[BlockId] = []
        self.reasons: list[str] = []
        self.freed: list[BlockId] = []

    def __call__(self, blocks: Sequence[BlockId], reason: str) -> None:
        assert blocks
        if reason in (FREED, DISCARDED):
            self.freed += blocks
        else:
            self.blocks += blocks
            self.reasons.append(reason)


def make(space: BlockSpace, evictions: Evictions | None = None, *, evict_at_least: int = 1) -> KVPool:
    return KVPool(
        tier=CacheTier.HBM,
        space=space,
        policy=LruPolicy(),
        on_ended=evictions or Evictions(),
        evict_at_least=evict_at_least,
    )


def slots(count: int) -> SlotSpace:
    return SlotSpace(BF16, count)


def given_out(pool: KVPool, count: int, spec: BlockSpec | None = None) -> tuple[BlockId, ...]:
    result = pool.allocate(count, spec)
    assert isinstance(result, AllocationResult)
    return result.block_ids


def test_blocks_come_with_their_tier() -> None:
    pool = make(slots(4))
    assert pool.allocate(2) == AllocationResult(block_ids=(BlockId(0), BlockId(1)), tier=CacheTier.HBM)
    assert pool.available() == 2


def test_what_is_released_stays_until_room_is_needed_and_goes_tails_first() -> None:
    evictions = Evictions()
    pool = make(slots(4), evictions)
    old = given_out(pool, 2)
    new = given_out(pool, 2)
    pool.release(old)
    pool.release(new)
    assert set(given_out(pool, 3)) == {*old, new[1]}
    assert evictions.blocks == [old[1], old[0], new[1]]
    assert pool.is_cached(new[0])


def test_what_is_freed_is_forgotten_and_used_before_anything_is_evicted() -> None:
    evictions = Evictions()
    pool = make(slots(4), evictions)
    kept, dropped = given_out(pool, 2), given_out(pool, 2)
    pool.release(kept)
    pool.free(dropped)
    given_out(pool, 2)
    assert evictions.blocks == []


def test_held_blocks_are_safe_from_eviction_and_count_as_used_when_they_are_released() -> None:
    evictions = Evictions()
    pool = make(slots(4), evictions)
    first, second = given_out(pool, 2), given_out(pool, 2)
    pool.release(first)
    pool.release(second)
    pool.hold(first)
    assert pool.allocate(3) == NoSpace(wanted=3, available=2)
    assert evictions.blocks == []
    pool.release(first)
    given_out(pool, 2)
    assert evictions.blocks == [second[1], second[0]]


def test_a_prompt_that_went_on_from_a_reused_one_leaves_from_its_end() -> None:
    evictions = Evictions()
    pool = make(slots(4), evictions)
    head = given_out(pool, 2)
    pool.release(head)
    pool.hold(head)
    tail = given_out(pool, 2)
    pool.release([*head, *tail])
    given_out(pool, 4)
    assert evictions.blocks == [tail[1], tail[0], head[1], head[0]]


def test_a_block_is_let_go_when_the_last_reference_is() -> None:
    pool = make(slots(2))
    blocks = given_out(pool, 2)
    pool.hold(blocks)
    assert pool.references(blocks[0]) == 2
    assert pool.are_shared(blocks)
    pool.free(blocks)
    assert (pool.references(blocks[0]), pool.available()) == (1, 0)
    pool.release(blocks)
    assert (pool.references(blocks[0]), pool.are_cached(blocks)) == (0, True)
    assert not pool.are_shared(blocks)


def test_a_refusal_evicts_nothing() -> None:
    evictions = Evictions()
    pool = make(slots(4), evictions)
    pool.release(given_out(pool, 2))
    given_out(pool, 1)
    assert pool.allocate(4) == NoSpace(wanted=4, available=3)
    assert evictions.blocks == []
    assert pool.counters.refusals == 1


def test_evicting_some_ahead_leaves_them_free_for_the_next_allocations() -> None:
    pool = make(slots(8), evict_at_least=4)
    pool.release(given_out(pool, 8))
    given_out(pool, 1)
    assert (pool.available(), pool.counters.evicted_blocks) == (3, 4)
    given_out(pool, 5)
    pool.check_integrity()


def test_discarded_blocks_are_free_at_once() -> None:
    evictions = Evictions()
    pool = make(slots(3), evictions)
    blocks = given_out(pool, 3)
    pool.release(blocks)
    pool.discard(blocks[:2])
    assert (pool.available(), evictions.blocks, evictions.freed) == (2, [], list(blocks[:2]))
    pool.check_integrity()


def test_misuse_is_refused_by_name_and_changes_nothing() -> None:
    pool = make(slots(4))
    pinned, cached = given_out(pool, 2), given_out(pool, 1)
    pool.release(cached)
    before = pool.get_utilization()
    free = BlockId(3)
    for call in (pool.free, pool.release):
        for wrong in ([free], [*pinned, *pinned], cached, [BlockId(77)]):
            with pytest.raises(AllocationError, match=r"not resident|named twice|pinned"):
                call(wrong)
    for wrong in ([free], [*cached, *cached], [*pinned, *pinned]):
        with pytest.raises(AllocationError, match=r"not resident|named twice"):
            pool.hold(wrong)
    for wrong in ([free], pinned, [*cached, *cached]):
        with pytest.raises(AllocationError, match=r"isn't cached|named twice"):
            pool.discard(wrong)
    with pytest.raises(AllocationError, match="-1 slots requested"):
        pool.allocate(-1)
    with pytest.raises(AllocationError, match="in a space of"):
        pool.allocate(1, FP8)
    with pytest.raises(AllocationError, match="evict_at_least"):
        make(slots(1), evict_at_least=0)
    assert pool.get_utilization() == before
    pool.check_integrity()


def test_utilization_is_the_bytes_of_each_state() -> None:
    pool = make(slots(10))
    pool.release(given_out(pool, 3))
    given_out(pool, 2)
    used = pool.get_utilization()
    assert (used.free_bytes, used.cached_bytes, used.pinned_bytes) == (20 * KIB, 12 * KIB, 8 * KIB)
    assert (used.pinned_ratio, used.occupied_ratio) == (0.2, 0.5)


def test_equal_blocks_lose_nothing_in_a_pool() -> None:
    pool = make(slots(10))
    given_out(pool, 5)
    assert (pool.get_fragmentation().internal_ratio, pool.get_fragmentation().external_ratio) == (0, 0)


def test_precisions_that_are_halves_of_each_other_share_a_region_without_loss() -> None:
    pool = make(BlockRegion(16 * KIB, [BF16, FP8, INT4]))
    blocks = [given_out(pool, 1, spec)[0] for spec in (INT4, BF16, FP8, INT4)]
    assert len({pool.space.offset_bytes(block) for block in blocks}) == 4
    assert pool.get_fragmentation().internal_ratio == 0
    assert pool.get_utilization().free_bytes == 8 * KIB


def test_what_rounding_to_powers_of_two_loses_is_internal_fragmentation() -> None:
    odd = BlockSpec(kv_format=KVFormat.INT8, tokens=64, size_bytes=5 * KIB // 2)
    region = BlockRegion(64 * KIB, [BF16, odd])
    pool = make(region)
    given_out(pool, 2, BF16)
    given_out(pool, 2, odd)
    taken = pool.get_utilization().pinned_bytes
    assert pool.get_fragmentation().internal_ratio == pytest.approx(1 - 13 * KIB / taken)


def test_scattered_free_bytes_are_external_fragmentation() -> None:
    pool = make(BlockRegion(16 * KIB, [BF16, INT4]))
    small = given_out(pool, 16, INT4)
    assert pool.get_fragmentation().external_ratio == 0
    pool.free(small[::2])
    assert pool.get_fragmentation().external_ratio == 1
    assert pool.allocate(1, BF16) == NoSpace(wanted=1, available=0, shortage=Shortage.FRAGMENTED)


def test_a_large_block_takes_the_place_of_what_the_policy_gives_up_and_of_its_neighbours() -> None:
    evictions = Evictions()
    pool = make(BlockRegion(16 * KIB, [BF16, INT4]), evictions)
    small = given_out(pool, 16, INT4)
    pool.free([small[0], small[4], small[5], small[8]])
    pool.release([small[6], small[7]])
    given_out(pool, 1, BF16)
    assert sorted(evictions.blocks) == [small[6], small[7]]
    assert pool.counters.cleared_blocks == 1
    assert "are to lie" in evictions.reasons[-1]


def test_a_large_block_finds_the_one_place_where_nothing_is_pinned() -> None:
    pool = make(BlockRegion(40 * KIB, [BF16, INT4]))
    small = given_out(pool, 40, INT4)
    for window in range(9):
        pool.release(small[4 * window + 1 : 4 * window + 4])
    pool.release(small[36:])
    result = pool.allocate(1, BF16)
    assert isinstance(result, AllocationResult)
    assert pool.space.offset_bytes(result.block_ids[0]) == 36 * KIB
    assert pool.counters.evicted_blocks <= 4 + 4 + 4
    assert pool.allocate(1, BF16) == NoSpace(wanted=1, available=0, shortage=Shortage.FRAGMENTED)


def test_a_region_needs_room_for_each_kind_of_block() -> None:
    with pytest.raises(AllocationError, match="no room for one block"):
        BlockRegion(3 * KIB, [BF16, INT4])
    with pytest.raises(AllocationError, match="at least one kind"):
        BlockRegion(3 * KIB, [])
    with pytest.raises(AllocationError, match="both must be > 0"):
        BlockSpec(kv_format=KVFormat.BF16, tokens=0, size_bytes=1)
    with pytest.raises(AllocationError, match="not resident"):
        BlockRegion(8 * KIB, [BF16]).offset_bytes(BlockId(0))


def test_a_block_that_ended_during_its_move_does_not_take_another_ones_place() -> None:
    region = BlockRegion(16 * KIB, [BF16, INT4])
    pool = make(region)
    compactor = Compactor(region, movable=pool.is_cached)
    small = given_out(pool, 16, INT4)
    pool.free(small[1:4] + small[7:8])
    pool.release(small[:1] + small[4:7])
    [move] = compactor.begin(BF16, max_moves=1)
    pool.discard([move.block])
    fresh = given_out(pool, 1, INT4)
    assert fresh[0] == move.block
    pool.release(fresh)
    where = region.offset_bytes(fresh[0])
    assert not compactor.finish(move, copied=True)
    assert region.offset_bytes(fresh[0]) == where
    pool.check_integrity()


def test_a_block_that_is_pinned_during_its_move_stays() -> None:
    region = BlockRegion(16 * KIB, [BF16, INT4])
    pool = make(region)
    compactor = Compactor(region, movable=pool.is_cached)
    small = given_out(pool, 16, INT4)
    pool.free(small[1:4] + small[7:8])
    pool.release(small[:1])
    [move] = compactor.begin(BF16, max_moves=1)
    pool.hold([move.block])
    assert not compactor.finish(move, copied=True)
    assert region.offset_bytes(move.block) == move.src * KIB


def test_a_compacted_region_takes_the_large_block_and_its_blocks_keep_their_ids() -> None:
    region = BlockRegion(16 * KIB, [BF16, INT4])
    pool = make(region)
    compactor = Compactor(region, movable=pool.is_cached)
    small = given_out(pool, 16, INT4)
    pool.free(small[1::2])
    pool.release(small[::2])
    while moves := compactor.begin(BF16, max_moves=2):
        assert all(compactor.finish(move, copied=True) for move in moves)
    assert (pool.get_fragmentation().external_ratio, pool.available(BF16)) == (0, 2)
    assert pool.are_cached(small[::2])


class PoolMachine(RuleBasedStateMachine):
    """A pool of equal blocks beside its naive twin: the same victims, the same states, the same references."""

    @initialize(capacity=st.integers(1, 10))
    def start(self, capacity: int) -> None:
        self.evictions = Evictions()
        self.pool = make(slots(capacity), self.evictions)
        self.naive = NaivePool(capacity)

    def some(self, data: st.DataObject, among: Sequence[BlockId]) -> list[BlockId]:
        return data.draw(st.lists(st.sampled_from(sorted(among)), unique=True)) if among else []

    @rule(count=st.integers(0, 11))
    def allocate(self, count: int) -> None:
        expected = self.naive.evicted_for(count)
        before = len(self.evictions.blocks)
        result = self.pool.allocate(count)
        if expected is None:
            assert isinstance(result, NoSpace)
            assert result.available == self.naive.free_blocks + len(self.naive.cached)
        else:
            assert isinstance(result, AllocationResult)
            assert len(result.block_ids) == count
            self.naive.allocate(result.block_ids)
        assert self.evictions.blocks[before:] == (expected or [])

    @rule(data=st.data(), keep=st.booleans())
    def drop(self, data: st.DataObject, keep: bool) -> None:  # noqa: FBT001
        path = self.some(data, list(self.naive.references))
        known = [block for block in path if block in self.pool._known and self.naive.references[block] == 1]
        (self.pool.release if keep else self.pool.free)(path)
        if keep:  # new blocks are older than those that were cached before
            self.naive.drop([block for block in path if block not in known], keep=True)
            self.naive.drop(known, keep=True)
        else:
            self.naive.drop(path, keep=False)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        path = self.some(data, [*self.naive.references, *self.naive.cached])
        self.pool.hold(path)
        self.naive.hold(path)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        blocks = self.some(data, self.naive.cached)
        self.pool.discard(blocks)
        self.naive.discard(blocks)

    @precondition(lambda self: hasattr(self, "pool"))
    @rule(block=st.integers(-1, 11))
    def misuse(self, block: BlockId) -> None:
        if block not in self.naive.references:
            for call in (self.pool.free, self.pool.release):
                with pytest.raises(AllocationError):
                    call([block])
        if block not in self.naive.cached:
            with pytest.raises(AllocationError):
                self.pool.discard([block])

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            used = self.pool.get_utilization()
            sizes = [len(self.naive.references), len(self.naive.cached), self.naive.free_blocks]
            assert [used.pinned_bytes, used.cached_bytes, used.free_bytes] == [size * BF16.size_bytes for size in sizes]
            assert all(self.pool.references(block) == count for block, count in self.naive.references.items())
            assert self.pool.are_cached(self.naive.cached)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            while pinned := list(self.naive.references):
                self.pool.free(pinned)
                self.naive.drop(pinned, keep=False)
            self.pool.discard(self.naive.cached)
            assert self.pool.available() == self.naive.capacity


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


class RegionMachine(RuleBasedStateMachine):
    """Mixed sizes with compaction under way, over a memory whose every unit says whose bytes it holds."""

    @initialize(units=st.integers(4, 32))
    def start(self, units: int) -> None:
        self.region = BlockRegion(units * KIB, [BF16, FP8, INT4])
        self.evictions = Evictions()
        self.pool = make(self.region, self.evictions)
        self.compactor = Compactor(self.region, movable=self.pool.is_cached)
        self.memory: list[int] = [-1] * units
        self.contents: dict[BlockId, int] = {}
        """What a block's bytes must be."""
        self.pinned: dict[BlockId, int] = {}
        self.moves: list[Relocation] = []
        self.written = 0

    def units_of(self, block: BlockId) -> range:
        start = self.region.offset_bytes(block) // KIB
        return range(start, start + self.region.spec(block).size_bytes // KIB)

    def some(self, data: st.DataObject, among: Sequence[BlockId]) -> list[BlockId]:
        return data.draw(st.lists(st.sampled_from(sorted(among)), unique=True)) if among else []

    def cached(self) -> list[BlockId]:
        return [block for block in self.contents if block not in self.pinned]

    @rule(count=st.integers(1, 3), spec=st.sampled_from([BF16, FP8, INT4]))
    def allocate(self, count: int, spec: BlockSpec) -> None:
        order = self.region.order(spec)
        pinned = NaiveUnits(self.region.units)
        for placed in self.region.placed():
            if not self.pool.is_cached(placed.block):
                pinned.take(placed.start, order=placed.order)
        before = len(self.evictions.blocks)
        result = self.pool.allocate(count, spec)
        for block in self.evictions.blocks[before:]:
            assert block not in self.pinned
            del self.contents[block]
        fits = pinned.available(order)
        if fits < count:
            assert isinstance(result, NoSpace)
            if result.shortage is Shortage.FULL:
                assert len(self.evictions.blocks) == before
            return
        assert isinstance(result, AllocationResult)
        for block in result.block_ids:
            assert block not in self.contents
            self.written += 1
            self.contents[block] = self.written
            self.pinned[block] = 1
            for unit in self.units_of(block):
                self.memory[unit] = self.written

    @rule(data=st.data(), keep=st.booleans())
    def drop(self, data: st.DataObject, keep: bool) -> None:  # noqa: FBT001
        self.drop_these(self.some(data, list(self.pinned)), keep=keep)

    def drop_these(self, path: list[BlockId], *, keep: bool) -> None:
        (self.pool.release if keep else self.pool.free)(path)
        for block in path:
            self.pinned[block] -= 1
            if not self.pinned[block]:
                del self.pinned[block]
                if not keep:
                    del self.contents[block]

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        path = self.some(data, list(self.contents))
        self.pool.hold(path)
        for block in path:
            self.pinned[block] = self.pinned.get(block, 0) + 1

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        blocks = self.some(data, self.cached())
        self.pool.discard(blocks)
        for block in blocks:
            del self.contents[block]

    @rule(data=st.data(), keep=st.booleans())
    def scatter(self, data: st.DataObject, keep: bool) -> None:  # noqa: FBT001
        """Fill what is free with small blocks and let some of them go: what compaction is for."""
        while self.pool.available(INT4):
            self.allocate(1, INT4)
        small = [block for block in self.pinned if self.pinned[block] == 1 and self.region.spec(block) == INT4]
        self.drop_these(self.some(data, small), keep=False)
        self.drop_these([block for block in small if block in self.pinned], keep=keep)

    @rule(max_moves=st.integers(1, 6), spec=st.sampled_from([BF16, FP8]))
    def begin(self, max_moves: int, spec: BlockSpec) -> None:
        moves = self.compactor.begin(spec, max_moves=max_moves)
        assert len(moves) <= max_moves
        assert not {move.block for move in moves} & self.pinned.keys()
        self.moves += moves

    @precondition(lambda self: getattr(self, "moves", None))
    @rule(data=st.data(), copied=st.booleans())
    def finish(self, data: st.DataObject, copied: bool) -> None:  # noqa: FBT001
        move = data.draw(st.sampled_from(self.moves))
        self.moves.remove(move)
        length = 1 << move.order
        if copied:
            self.memory[move.dst : move.dst + length] = self.memory[move.src : move.src + length]
        moved = self.compactor.finish(move, copied=copied)
        if moved:
            assert move.block not in self.pinned
            self.memory[move.src : move.src + length] = [-2] * length
        with pytest.raises(AllocationError, match="not under way"):
            self.compactor.finish(move, copied=True)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            used = self.pool.get_utilization()
            assert used.free_bytes + used.cached_bytes + used.pinned_bytes == used.capacity_bytes
            assert set(self.cached()) == self.pool._cached.keys()
            for block, content in self.contents.items():
                assert all(self.memory[unit] == content for unit in self.units_of(block))

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for move in self.moves:
                self.compactor.finish(move, copied=False)
            self.pool.discard(self.cached())
            while self.pinned:
                self.drop_all()
            assert self.region.resident_blocks == 0
            assert self.pool.get_utilization().free_bytes == self.region.capacity_bytes

    def drop_all(self) -> None:
        path = list(self.pinned)
        self.pool.free(path)
        self.pinned = {block: count - 1 for block, count in self.pinned.items() if count > 1}


TestRegionMachine = RegionMachine.TestCase
TestRegionMachine.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
