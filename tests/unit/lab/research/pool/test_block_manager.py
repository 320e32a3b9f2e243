"""Whatever requests share, fork, lose and get back: each reads its own tokens, and no block is lost or freed twice."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcontrol.core.blocks import CacheTier, KVFormat
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import LruPolicy
from kvcontrol.kv_runtime import AllocationError, NoSpace, RequestError
from lab.research.pool.block_manager import BlockCopy, BlockManager, BlockTable, Extension, RequestState, Resumption
from lab.research.pool.pool import AllocationResult, KVPool, OnEnded, ignore
from lab.research.pool.space import BlockRegion, BlockSpec, SlotSpace
from tests.support.examples import examples

SIZE = 4
SPEC = BlockSpec(kv_format=KVFormat.BF16, tokens=SIZE, size_bytes=1024)
SMALL = BlockSpec(kv_format=KVFormat.FP8, tokens=SIZE, size_bytes=512)


def make(blocks: int, on_ended: OnEnded = ignore) -> BlockManager:
    pool = KVPool(tier=CacheTier.HBM, space=SlotSpace(SPEC, blocks), policy=LruPolicy(), on_ended=on_ended)
    return BlockManager(pool)


def begun(manager: BlockManager, request_id: str, tokens: int, reuse: Sequence[BlockId] = ()) -> tuple[BlockId, ...]:
    result = manager.allocate(request_id, tokens, reuse=reuse)
    assert isinstance(result, AllocationResult)
    return result.block_ids


def test_a_request_has_as_many_blocks_as_its_tokens_need() -> None:
    manager = make(8)
    assert [len(begun(manager, str(tokens), tokens)) for tokens in (1, 4, 5)] == [1, 1, 2]


def test_appending_takes_a_block_only_when_the_last_one_is_full() -> None:
    manager = make(3)
    begun(manager, "a", 3)
    assert manager.append("a") == Extension(block_ids=(), copies=())
    assert manager.append("a") == Extension(block_ids=(BlockId(1),), copies=())
    assert manager.append("a", 4) == Extension(block_ids=(BlockId(2),), copies=())
    assert manager.append("a", 4) == NoSpace(wanted=1, available=0)
    assert manager.table("a") == BlockTable(
        request_id="a", state=RequestState.RUNNING, tokens=9, block_ids=(BlockId(0), BlockId(1), BlockId(2))
    )


def test_a_fork_shares_all_blocks_and_who_appends_first_gets_a_copy_of_the_unfilled_one() -> None:
    manager = make(8)
    blocks = begun(manager, "a", 6)
    manager.fork("a", "b")
    extension = manager.append("b")
    assert extension == Extension(block_ids=(), copies=(BlockCopy(blocks[1], BlockId(2)),))
    assert manager.table("b").block_ids == (blocks[0], BlockId(2))
    assert manager.append("a") == Extension(block_ids=(), copies=())
    manager.check_integrity()


def test_a_fork_at_a_full_block_copies_nothing() -> None:
    manager = make(8)
    begun(manager, "a", 4)
    manager.fork("a", "b")
    assert manager.append("b") == Extension(block_ids=(BlockId(1),), copies=())


def test_a_copy_that_finds_no_room_changes_nothing() -> None:
    manager = make(1)
    begun(manager, "a", 2)
    manager.fork("a", "b")
    assert manager.append("b") == NoSpace(wanted=1, available=0)
    assert manager.table("b") == BlockTable(
        request_id="b", state=RequestState.RUNNING, tokens=2, block_ids=(BlockId(0),)
    )


def test_full_blocks_of_an_ended_request_can_be_reused_and_are_shared_while_in_use() -> None:
    manager = make(4)
    blocks = begun(manager, "a", 9)
    manager.free("a")
    assert [manager.pool.is_cached(block) for block in blocks] == [True, True, False]
    assert begun(manager, "b", 10, reuse=blocks[:2])[:2] == blocks[:2]
    begun(manager, "c", 8, reuse=blocks[:2])
    assert manager.pool.references(blocks[0]) == 2
    assert manager.allocate("d", 16, reuse=blocks[:1]) == NoSpace(wanted=3, available=1)
    assert manager.pool.references(blocks[0]) == 2
    assert "d" not in manager


def test_blocks_whose_kv_was_never_written_are_not_kept() -> None:
    manager = make(4)
    blocks = begun(manager, "a", 12)
    manager.free("a", written_tokens=7)
    assert [manager.pool.is_cached(block) for block in blocks] == [True, False, False]


def test_a_cancelled_request_leaves_the_blocks_that_it_reused_in_the_cache() -> None:
    manager = make(4)
    blocks = begun(manager, "a", 8)
    manager.free("a")
    begun(manager, "b", 16, reuse=blocks)
    manager.free("b", written_tokens=0)
    assert manager.pool.are_cached(blocks)
    assert manager.pool.available() == 2


def test_what_was_reused_before_a_preemption_does_not_count_as_written_after_it_was_lost() -> None:
    manager = make(2)
    blocks = begun(manager, "a", 8)
    manager.free("a")
    begun(manager, "b", 8, reuse=blocks)
    manager.preempt("b")
    begun(manager, "c", 8)
    manager.free("c", written_tokens=0)
    assert manager.resume("b") == Resumption(block_ids=(BlockId(1), BlockId(0)), kept_tokens=0)
    manager.free("b", written_tokens=0)
    assert manager.pool.available() == 2


def test_blocks_that_the_cache_has_elsewhere_are_not_kept() -> None:
    manager = make(4)
    blocks = begun(manager, "a", 12)
    manager.free("a", discard=blocks[:1])
    assert [manager.pool.is_cached(block) for block in blocks] == [False, True, True]


def test_a_preempted_request_finds_again_what_was_not_evicted() -> None:
    manager = make(4)
    blocks = begun(manager, "a", 14)
    manager.preempt("a")
    assert manager.table("a") == BlockTable(request_id="a", state=RequestState.PREEMPTED, tokens=14, block_ids=())
    begun(manager, "b", 8)
    assert manager.resume("a") == NoSpace(wanted=2, available=0)
    manager.free("b", written_tokens=0)
    resumed = manager.resume("a")
    assert isinstance(resumed, Resumption)
    assert (resumed.block_ids[:2], resumed.kept_tokens, len(resumed.block_ids)) == (blocks[:2], 8, 4)


def test_a_preempted_request_does_not_take_its_blocks_for_its_own_after_others_wrote_them() -> None:
    manager = make(3)
    begun(manager, "a", 12)
    manager.preempt("a")
    begun(manager, "b", 12)
    manager.preempt("b")
    resumed = manager.resume("a")
    assert isinstance(resumed, Resumption)
    assert resumed.kept_tokens == 0


def test_a_preempted_request_can_be_given_up() -> None:
    manager = make(2)
    begun(manager, "a", 5)
    manager.preempt("a", written_tokens=0)
    manager.free("a")
    assert (len(manager), manager.pool.available()) == (0, 2)


def test_misuse_is_refused_by_name_and_changes_nothing() -> None:
    manager = make(4)
    blocks = begun(manager, "a", 5)
    begun(manager, "p", 5)
    manager.preempt("p")
    with pytest.raises(RequestError, match="a has blocks already"):
        manager.allocate("a", 1)
    with pytest.raises(RequestError, match="at least 1"):
        manager.allocate("b", 0)
    with pytest.raises(RequestError, match="at least 1"):
        manager.append("a", 0)
    with pytest.raises(RequestError, match="can't reuse 2"):
        manager.allocate("b", 7, reuse=blocks)
    with pytest.raises(AllocationError, match="not resident"):
        manager.allocate("b", 7, reuse=[BlockId(3)])
    with pytest.raises(RequestError, match="6 tokens written"):
        manager.free("a", written_tokens=6)
    with pytest.raises(AllocationError, match="no block 3 to discard"):
        manager.free("a", discard=[BlockId(3)])
    with pytest.raises(RequestError, match="is preempted"):
        manager.free("p", written_tokens=0)
    with pytest.raises(RequestError, match="a has blocks already"):
        manager.fork("a", "a")
    for call in (manager.append, manager.preempt, lambda name: manager.fork(name, "x")):
        with pytest.raises(RequestError, match="is preempted; this call needs a running one"):
            call("p")
    with pytest.raises(RequestError, match="is running; this call needs a preempted one"):
        manager.resume("a")
    for call in (manager.append, manager.preempt, manager.resume, manager.free, manager.table):
        with pytest.raises(RequestError, match="ghost is not known"):
            call("ghost")
    assert manager.table("a").block_ids == blocks
    manager.check_integrity()


def test_blocks_of_another_kind_are_not_reused() -> None:
    region = BlockRegion(8192, [SPEC, SMALL])
    pool = KVPool(tier=CacheTier.HBM, space=region, policy=LruPolicy())
    large, small = BlockManager(pool), BlockManager(pool, spec=SMALL)
    blocks = begun(small, "a", 4)
    small.free("a")
    with pytest.raises(AllocationError, match="another kind"):
        large.allocate("b", 4, reuse=blocks)
    assert begun(small, "b", 4, reuse=blocks) == blocks


def test_internal_fragmentation_is_what_running_requests_blocks_do_not_hold() -> None:
    manager = make(8)
    assert manager.get_fragmentation().internal_ratio == 0
    begun(manager, "a", 5)
    begun(manager, "b", 1)
    manager.fork("a", "c")
    assert manager.get_fragmentation().internal_ratio == 0.5
    manager.free("b")
    assert manager.get_fragmentation().internal_ratio == 1 - 5 / 8
    assert manager.get_utilization().pinned_ratio == 0.25


class ManagerMachine(RuleBasedStateMachine):
    """Requests over a memory that really holds tokens: what a table leads to is compared with what was written."""

    @initialize(blocks=st.integers(2, 9))
    def start(self, blocks: int) -> None:
        self.manager = make(blocks, self.forget)
        self.capacity = blocks
        self.memory = {(BlockId(block), place): -1 for block in range(blocks) for place in range(SIZE)}
        self.said: dict[str, list[int]] = {}
        self.preempted: dict[str, list[int]] = {}
        self.index: dict[tuple[int, ...], BlockId] = {}
        """Cached full blocks by all tokens up to their end; many prompts share beginnings."""
        self.named = 0

    def forget(self, blocks: Sequence[BlockId], reason: str) -> None:
        assert reason
        gone = set(blocks)
        self.index = {tokens: block for tokens, block in self.index.items() if block not in gone}

    def write(self, request_id: str, tokens: list[int], since: int) -> None:
        blocks = self.manager.table(request_id).block_ids
        for place in range(since, len(tokens)):
            block = blocks[place // SIZE]
            assert self.manager.pool.references(block) == 1, "a shared block is written"
            self.memory[block, place % SIZE] = tokens[place]

    def reusable(self, tokens: list[int]) -> list[BlockId]:
        blocks: list[BlockId] = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            block = self.index.get(tuple(tokens[:end]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18))
    def allocate(self, tokens: list[int]) -> None:
        self.named += 1
        name = f"r{self.named}"
        reuse = self.reusable(tokens)
        needed = -(-len(tokens) // SIZE)
        free = self.capacity - self.pinned()
        newly = needed - sum(not self.manager.pool.is_cached(block) for block in reuse)
        result = self.manager.allocate(name, len(tokens), reuse=reuse)
        if newly > free:
            assert isinstance(result, NoSpace)
            assert name not in self.manager
            return
        assert isinstance(result, AllocationResult)
        self.write(name, tokens, len(reuse) * SIZE)
        self.said[name] = tokens

    def pinned(self) -> int:
        return self.manager.get_utilization().pinned_bytes // SPEC.size_bytes

    @precondition(lambda self: getattr(self, "said", None))
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, data: st.DataObject, more: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        before = len(self.said[name])
        extension = self.manager.append(name, len(more))
        if isinstance(extension, NoSpace):
            assert self.manager.table(name).tokens == before
            return
        for copy in extension.copies:
            for place in range(SIZE):
                self.memory[copy.dst, place] = self.memory[copy.src, place]
        self.said[name] = [*self.said[name], *more]
        self.write(name, self.said[name], before)

    @precondition(lambda self: getattr(self, "said", None))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        self.named += 1
        self.manager.fork(name, f"r{self.named}")
        self.said[f"r{self.named}"] = list(self.said[name])

    @precondition(lambda self: getattr(self, "said", None))
    @rule(data=st.data(), written=st.booleans())
    def free(self, data: st.DataObject, written: bool) -> None:  # noqa: FBT001
        name = data.draw(st.sampled_from(sorted(self.said)))
        tokens = self.said.pop(name)
        blocks = self.manager.table(name).block_ids
        if not written:
            self.manager.free(name, written_tokens=0)
            return
        redundant = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            block = blocks[end // SIZE - 1]
            if self.index.setdefault(tuple(tokens[:end]), block) != block:
                redundant.append(block)
        self.manager.free(name, discard=redundant)

    @precondition(lambda self: getattr(self, "said", None))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        self.manager.preempt(name)
        self.preempted[name] = self.said.pop(name)

    @precondition(lambda self: getattr(self, "preempted", None))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.preempted)))
        resumed = self.manager.resume(name)
        if isinstance(resumed, NoSpace):
            assert self.manager.table(name).state is RequestState.PREEMPTED
            return
        tokens = self.said[name] = self.preempted.pop(name)
        self.write(name, tokens, resumed.kept_tokens)

    @precondition(lambda self: getattr(self, "preempted", None))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.preempted)))
        self.manager.free(name)
        del self.preempted[name]

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        owners: dict[BlockId, int] = {}
        for name, tokens in self.said.items():
            table = self.manager.table(name)
            read = [self.memory[table.block_ids[place // SIZE], place % SIZE] for place in range(table.tokens)]
            assert read == tokens
            for block in table.block_ids:
                owners[block] = owners.get(block, 0) + 1
        assert all(self.manager.pool.references(block) == count for block, count in owners.items())
        assert self.pinned() == len(owners)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for name in [*self.said, *self.preempted]:
                self.manager.free(name)
            assert self.pinned() == 0
            assert isinstance(self.manager.allocate("all", self.capacity * SIZE), AllocationResult)
            self.manager.check_integrity()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=examples(250), stateful_step_count=50, deadline=None)
