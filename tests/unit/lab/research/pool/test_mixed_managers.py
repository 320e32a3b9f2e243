"""Requests of two precisions over one region, with compaction under way: each reads its own tokens, in every unit."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcontrol.core.blocks import CacheTier, KVFormat
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import LruPolicy
from kvcontrol.kv_runtime import NoSpace, RequestError
from lab.research.pool.block_manager import BlockManager
from lab.research.pool.defrag import Compactor, Relocation
from lab.research.pool.pool import AllocationResult, KVPool
from lab.research.pool.space import BlockRegion, BlockSpec
from tests.support.examples import examples

SIZE = 4
UNIT_BYTES = 512
LARGE = BlockSpec(kv_format=KVFormat.BF16, tokens=SIZE, size_bytes=2 * UNIT_BYTES)
SMALL = BlockSpec(kv_format=KVFormat.FP8, tokens=SIZE, size_bytes=UNIT_BYTES)


class MixedMachine(RuleBasedStateMachine):
    """A memory of units; a large block's token is written to both of its units, so that nobody may touch either."""

    @initialize(units=st.integers(4, 14))
    def start(self, units: int) -> None:
        self.region = BlockRegion(units * UNIT_BYTES, [LARGE, SMALL])
        self.pool = KVPool(tier=CacheTier.HBM, space=self.region, policy=LruPolicy(), on_ended=self.forget)
        self.managers = {"large": BlockManager(self.pool), "small": BlockManager(self.pool, spec=SMALL)}
        self.compactor = Compactor(self.region, movable=self.pool.is_cached)
        self.memory = [[-1] * SIZE for _ in range(units)]
        self.said: dict[str, list[int]] = {}
        self.preempted: dict[str, list[int]] = {}
        self.index: dict[tuple[str, tuple[int, ...]], BlockId] = {}
        self.moves: list[Relocation] = []
        self.named = 0

    def forget(self, blocks: Sequence[BlockId], reason: str) -> None:
        assert reason
        gone = set(blocks)
        self.index = {key: block for key, block in self.index.items() if block not in gone}

    def of(self, name: str) -> BlockManager:
        return self.managers[name.partition("-")[0]]

    def units(self, block: BlockId) -> range:
        first = self.region.offset_bytes(block) // UNIT_BYTES
        return range(first, first + self.region.spec(block).size_bytes // UNIT_BYTES)

    def write(self, name: str, since: int) -> None:
        tokens, blocks = self.said[name], self.of(name).table(name).block_ids
        for place in range(since, len(tokens)):
            block = blocks[place // SIZE]
            assert self.pool.references(block) == 1, "a shared block is written"
            for unit in self.units(block):
                self.memory[unit][place % SIZE] = tokens[place]

    @rule(kind=st.sampled_from(["large", "small"]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def allocate(self, kind: str, tokens: list[int]) -> None:
        self.named += 1
        name = f"{kind}-{self.named}"
        reuse: list[BlockId] = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            block = self.index.get((kind, tuple(tokens[:end])))
            if block is None:
                break
            reuse.append(block)
        references = [self.pool.references(block) for block in reuse]
        result = self.managers[kind].allocate(name, len(tokens), reuse=reuse)
        if isinstance(result, NoSpace):
            assert name not in self.managers[kind]
            assert [self.pool.references(block) for block in reuse] == references
            return
        self.said[name] = tokens
        self.write(name, len(reuse) * SIZE)

    @precondition(lambda self: getattr(self, "index", None))
    @rule(data=st.data())
    def revisit(self, data: st.DataObject) -> None:
        kind, tokens = data.draw(st.sampled_from(sorted(self.index)))
        self.allocate(kind, list(tokens))

    @precondition(lambda self: getattr(self, "said", None))
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, data: st.DataObject, more: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        before = len(self.said[name])
        extension = self.of(name).append(name, len(more))
        if isinstance(extension, NoSpace):
            assert self.of(name).table(name).tokens == before
            return
        for copy in extension.copies:
            for src, dst in zip(self.units(copy.src), self.units(copy.dst), strict=True):
                self.memory[dst] = list(self.memory[src])
        self.said[name] = [*self.said[name], *more]
        self.write(name, before)

    @precondition(lambda self: getattr(self, "said", None))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        self.named += 1
        child = f"{name.partition('-')[0]}-{self.named}"
        self.of(name).fork(name, child)
        self.said[child] = list(self.said[name])

    @precondition(lambda self: getattr(self, "said", None))
    @rule(data=st.data(), written=st.booleans())
    def free(self, data: st.DataObject, written: bool) -> None:  # noqa: FBT001
        name = data.draw(st.sampled_from(sorted(self.said)))
        manager, kind = self.of(name), name.partition("-")[0]
        tokens, blocks = self.said.pop(name), manager.table(name).block_ids
        redundant = []
        for end in range(SIZE, len(tokens) + 1 if written else 0, SIZE):
            block = blocks[end // SIZE - 1]
            if self.index.setdefault((kind, tuple(tokens[:end])), block) != block:
                redundant.append(block)
        manager.free(name, written_tokens=None if written else 0, discard=redundant)
        for call in (manager.free, manager.append, manager.preempt, manager.resume, manager.table):
            with pytest.raises(RequestError, match="is not known"):
                call(name)

    @precondition(lambda self: getattr(self, "said", None))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.said)))
        self.of(name).preempt(name)
        self.preempted[name] = self.said.pop(name)

    @precondition(lambda self: getattr(self, "preempted", None))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.preempted)))
        resumed = self.of(name).resume(name)
        if not isinstance(resumed, NoSpace):
            self.said[name] = self.preempted.pop(name)
            self.write(name, resumed.kept_tokens)

    @rule()
    def scatter(self) -> None:
        """Fill what is free with small requests, and let every second one's block stay cached: work for compaction."""
        filled = []
        while self.pool.available(SMALL):
            self.named += 1
            name = f"small-{self.named}"
            assert isinstance(self.managers["small"].allocate(name, SIZE), AllocationResult)
            self.said[name] = [100 + self.named] * SIZE
            self.write(name, 0)
            filled.append(name)
        for place, name in enumerate(filled):
            [block] = self.managers["small"].table(name).block_ids
            if place % 2:
                self.index["small", tuple(self.said[name])] = block
            del self.said[name]
            self.managers["small"].free(name, written_tokens=SIZE * (place % 2))

    @rule(max_moves=st.integers(1, 5))
    def begin(self, max_moves: int) -> None:
        moves = self.compactor.begin(LARGE, max_moves=max_moves)
        if not moves:
            self.scatter()
            moves = self.compactor.begin(LARGE, max_moves=max_moves)
        assert len(moves) <= max_moves
        self.moves += moves

    @precondition(lambda self: getattr(self, "moves", None))
    @rule(data=st.data())
    def use_what_is_moving(self, data: st.DataObject) -> None:
        move = data.draw(st.sampled_from(self.moves))
        for (kind, tokens), block in list(self.index.items()):
            if block == move.block:
                self.allocate(kind, list(tokens))
                return

    @precondition(lambda self: getattr(self, "moves", None))
    @rule(data=st.data(), copied=st.booleans())
    def finish(self, data: st.DataObject, copied: bool) -> None:  # noqa: FBT001
        move = data.draw(st.sampled_from(self.moves))
        self.moves.remove(move)
        if copied:
            for unit in range(1 << move.order):
                self.memory[move.dst + unit] = list(self.memory[move.src + unit])
        if self.compactor.finish(move, copied=copied):
            assert copied
            assert self.pool.references(move.block) == 0, "a block in use was moved"
            for unit in range(1 << move.order):
                self.memory[move.src + unit] = [-2] * SIZE

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        owners: dict[BlockId, int] = {}
        for name, tokens in self.said.items():
            table = self.of(name).table(name)
            for place, token in enumerate(tokens):
                units = self.units(table.block_ids[place // SIZE])
                assert all(self.memory[unit][place % SIZE] == token for unit in units), name
            for block in table.block_ids:
                owners[block] = owners.get(block, 0) + 1
        for manager in self.managers.values():
            manager.check_integrity()
        assert all(self.pool.references(block) == count for block, count in owners.items())
        taken = [unit for block in owners for unit in self.units(block)]
        assert len(set(taken)) == len(taken), "a unit has two owners"
        used = self.pool.get_utilization()
        landing = sum(1 << move.order for move in self.moves)
        assert used.pinned_bytes == (len(taken) + landing) * UNIT_BYTES, "pinned is what is used or about to be"
        assert used.free_bytes + used.cached_bytes + used.pinned_bytes == used.capacity_bytes
        for (kind, tokens), block in self.index.items():  # what is cached is what it was, wherever it was moved to
            first = len(tokens) - SIZE
            assert self.region.spec(block) is self.managers[kind].spec
            for unit in self.units(block):
                assert self.memory[unit] == list(tokens[first:])

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for move in self.moves:
                self.compactor.finish(move, copied=False)
            for name in [*self.said, *self.preempted]:
                self.of(name).free(name)
            assert self.pool.get_utilization().pinned_bytes == 0
            everything = self.region.units // 2 * SIZE
            assert isinstance(self.managers["large"].allocate("large-all", everything), AllocationResult)
            self.managers["large"].free("large-all", written_tokens=0)
            everything = self.region.units * SIZE
            assert isinstance(self.managers["small"].allocate("small-all", everything), AllocationResult)
            self.managers["small"].free("small-all", written_tokens=0)
            used = self.pool.get_utilization()
            assert used.free_bytes == used.capacity_bytes


TestMixedMachine = MixedMachine.TestCase
TestMixedMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
