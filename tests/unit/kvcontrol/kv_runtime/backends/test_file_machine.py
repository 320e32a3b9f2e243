"""Written, read, erased, damaged and restarted in any order: a read gives the block that was asked for, or says no."""

import random
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcontrol.kv_runtime import BlockFileSpec, BlockStatus, HostArena, Move, Recovered
from kvcontrol.kv_runtime.backends.file import FileBackend
from tests.support.examples import examples
from tests.support.kv_blocks import Block, get, put, random_block

MOST_SLOTS = 8
BLOCK_BYTES = 5_000
SLOTS = st.integers(0, MOST_SLOTS - 1)


class FileMachine(RuleBasedStateMachine):
    """``held`` is what each slot must give, ``lost`` what it held last and must not give any more.

    Those in ``listed`` are lost by their payload alone: a restart finds their headers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.spec = BlockFileSpec(
            path=Path(self.folder.name) / "blocks", slots=MOST_SLOTS, block_bytes=BLOCK_BYTES, identity=b"m"
        )
        self.arena = HostArena(slots=MOST_SLOTS, block_bytes=BLOCK_BYTES)
        self.held: dict[int, Block] = {}
        self.lost: dict[int, Block] = {}
        self.listed: set[int] = set()

    @initialize(seed=st.integers(0, 2**32), direct=st.booleans())
    def start(self, seed: int, direct: bool) -> None:  # noqa: FBT001 - drawn
        self.rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self.spec = replace(self.spec, preallocate=direct)
        self.tier = FileBackend(self.spec)
        self.stranger = random_block(self.rng, BLOCK_BYTES)

    @rule(slots=st.lists(SLOTS, unique=True), in_order=st.booleans())
    def write(self, slots: list[int], in_order: bool) -> None:  # noqa: FBT001 - drawn
        slots = [slot for slot in (sorted(slots) if in_order else slots) if slot < self.spec.slots]
        blocks = {slot: random_block(self.rng, BLOCK_BYTES) for slot in slots}
        hosts = self.rng.sample(range(MOST_SLOTS), len(slots))
        for host, block in zip(hosts, blocks.values(), strict=True):
            put(self.arena, host, block.data)
        moves = [Move(slot, host, blocks[slot].seal) for slot, host in zip(slots, hosts, strict=True)]
        assert self.tier.write(moves, self.arena) == [BlockStatus.OK] * len(slots)
        self.held |= blocks
        self.listed -= set(slots)

    @rule(slots=st.lists(SLOTS, unique=True), in_order=st.booleans())
    def read(self, slots: list[int], in_order: bool) -> None:  # noqa: FBT001 - drawn
        slots = [slot for slot in (sorted(slots) if in_order else slots) if slot < self.spec.slots]
        asked = [self.held.get(slot) or self.lost.get(slot, self.stranger) for slot in slots]
        moves = [Move(slot, host, block.seal) for host, (slot, block) in enumerate(zip(slots, asked, strict=True))]
        statuses = self.tier.read(moves, self.arena)
        assert statuses == [BlockStatus.OK if slot in self.held else BlockStatus.CORRUPT for slot in slots]
        for host, (slot, block) in enumerate(zip(slots, asked, strict=True)):
            assert slot not in self.held or get(self.arena, host) == block.data

    @rule(slot=SLOTS, other=SLOTS)
    def ask_for_another_block(self, slot: int, other: int) -> None:
        if slot != other and slot < self.spec.slots:
            block = self.held.get(other, self.stranger)
            assert self.tier.read([Move(slot, 0, block.seal)], self.arena) == [BlockStatus.CORRUPT]

    @rule(slots=st.lists(SLOTS))
    def erase(self, slots: list[int]) -> None:
        slots = [slot for slot in slots if slot < self.spec.slots]
        assert self.tier.erase(slots) == [BlockStatus.OK] * len(slots)
        for slot in set(slots) & set(self.held):
            self.lost[slot] = self.held.pop(slot)
        self.listed -= set(slots)

    @rule(slot=SLOTS, at=st.integers(0, 4095) | st.integers(4096, 4095 + BLOCK_BYTES), bit=st.integers(0, 7))
    def flip(self, slot: int, at: int, bit: int) -> None:
        if slot not in self.held:
            return
        with self.spec.path.open("r+b", buffering=0) as raw:
            raw.seek(self.spec.header_at(slot) + at)
            (byte,) = raw.read(1)
            raw.seek(self.spec.header_at(slot) + at)
            raw.write(bytes([byte ^ (1 << bit)]))
        self.lost[slot] = self.held.pop(slot)
        if at >= 4096:
            self.listed.add(slot)
        assert self.tier.read([Move(slot, 0, self.lost[slot].seal)], self.arena) == [BlockStatus.CORRUPT]

    @rule(slots=st.sampled_from([MOST_SLOTS, 5, 2]))
    def restart(self, slots: int) -> None:
        self.tier.close()
        self.spec = replace(self.spec, slots=slots)
        for slot in [slot for slot in self.held if slot >= slots]:
            self.lost[slot] = self.held.pop(slot)
        self.listed -= set(range(slots, MOST_SLOTS))
        self.tier = FileBackend(self.spec)
        found = {slot: block.seal for slot, block in self.held.items()}
        found |= {slot: self.lost[slot].seal for slot in self.listed}
        assert self.tier.recover() == [Recovered(slot, found[slot]) for slot in sorted(found)]

    @invariant()
    def the_file_has_its_size(self) -> None:
        assert self.spec.path.stat().st_size == self.spec.size_bytes

    def teardown(self) -> None:
        self.tier.close()
        self.arena.close()
        self.folder.cleanup()


TestFileMachine = FileMachine.TestCase
TestFileMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
