"""Where a pool's blocks lie: slots of one size, or runs of several sizes in one region.

Both give a block an id that stays its own until it is freed, whatever moves beneath; ``offset_bytes`` says where it is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol, cast

from kvcontrol.core.blocks import KVFormat
from kvcontrol.core.ids import BlockId
from kvcontrol.core.integrity import must
from kvcontrol.kv_runtime.errors import AllocationError
from kvcontrol.kv_runtime.refusal import NoSpace
from kvcontrol.kv_runtime.slab import SlabAllocator
from lab.research.pool.buddy import BuddyAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A kind of block: how many tokens' KV it holds, in which precision, in how many bytes (scales included)."""

    kv_format: KVFormat
    tokens: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.tokens <= 0 or self.size_bytes <= 0:
            raise AllocationError(f"a block of {self.tokens} tokens in {self.size_bytes} bytes; both must be > 0")


class BlockSpace(Protocol):
    """Room for blocks of ``specs``. Every block is resident from ``allocate`` to ``free``. Not thread-safe."""

    specs: tuple[BlockSpec, ...]
    capacity_bytes: int

    @property
    def units(self) -> int:
        """The pieces that every block's run is made of; they have equal sizes."""

    @property
    def resident_blocks(self) -> int:
        """How many blocks there are, of whatever kind."""

    @property
    def free_bytes(self) -> int:
        """Bytes that no block has."""

    def available(self, spec: BlockSpec) -> int:
        """Return how many blocks could be allocated now."""

    def allocate(self, spec: BlockSpec, count: int) -> list[BlockId] | NoSpace:
        """Make blocks resident, all or none. ``AllocationError`` for a spec that isn't one of ``specs``."""

    def free(self, blocks: Sequence[BlockId]) -> None:
        """End blocks. ``AllocationError``, and no change, if one isn't resident or is named twice."""

    def holds(self, blocks: Iterable[BlockId]) -> bool:
        """Whether all of them are resident."""

    def spec(self, block: BlockId) -> BlockSpec:
        """Return what a resident block is; ``AllocationError`` otherwise."""

    def offset_bytes(self, block: BlockId) -> int:
        """Return where a resident block begins; ``AllocationError`` otherwise."""

    def reserved_bytes(self, blocks: Sequence[BlockId]) -> int:
        """Return the bytes that resident blocks take, with what is lost to rounding."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all resident blocks by their specs, without rounding."""

    def placed(self) -> "list[PlacedBlock]":
        """Return every resident block with its place; empty where places can't matter."""

    def neighbours(self, block: BlockId, order: int) -> "list[BlockId]":
        """Return all blocks in the aligned run of ``2**order`` units about a resident block, itself included."""

    def order(self, spec: BlockSpec) -> int:
        """Return the size of a spec's runs as a power of two of units."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""


class PlacedBlock(NamedTuple):
    """A block's run: ``2**order`` units from ``start``."""

    block: BlockId
    start: int
    order: int


class SlotSpace:
    """Slots of one size: DDR, NVMe, and HBM where all blocks are alike. A block's id is its slot."""

    def __init__(self, spec: BlockSpec, slots: int) -> None:
        self.specs: tuple[BlockSpec, ...] = (spec,)
        self.slab = SlabAllocator(slots)
        self.capacity_bytes = slots * spec.size_bytes
        self._spec = spec

    @property
    def units(self) -> int:
        """See ``BlockSpace``: a unit is a slot."""
        return self.slab.capacity

    @property
    def resident_blocks(self) -> int:
        """See ``BlockSpace``."""
        return self.slab.used

    @property
    def free_bytes(self) -> int:
        """See ``BlockSpace``."""
        return self.slab.available * self._spec.size_bytes

    @property
    def stored_bytes(self) -> int:
        """See ``BlockSpace``."""
        return self.slab.used * self._spec.size_bytes

    def available(self, spec: BlockSpec) -> int:
        if spec is not self._spec:
            self.order(spec)
        return self.slab.available

    def allocate(self, spec: BlockSpec, count: int) -> list[BlockId] | NoSpace:
        if spec is not self._spec:
            self.order(spec)
        return cast("list[BlockId] | NoSpace", self.slab.allocate(count))

    def free(self, blocks: Sequence[BlockId]) -> None:
        self.slab.free(blocks)

    def holds(self, blocks: Iterable[BlockId]) -> bool:
        return self.slab.holds(blocks)

    def spec(self, block: BlockId) -> BlockSpec:
        if block not in self.slab:
            raise AllocationError(f"block {block} is not resident")
        return self._spec

    def offset_bytes(self, block: BlockId) -> int:
        return self.spec(block).size_bytes * block

    def reserved_bytes(self, blocks: Sequence[BlockId]) -> int:
        return len(blocks) * self._spec.size_bytes

    def placed(self) -> list[PlacedBlock]:
        return []

    def neighbours(self, block: BlockId, order: int) -> list[BlockId]:
        return [
            BlockId(slot) for slot in range(block >> order << order, (block >> order) + 1 << order) if slot in self.slab
        ]

    def order(self, spec: BlockSpec) -> int:
        if spec != self._spec:
            raise AllocationError(f"{spec} in a space of {self._spec}")
        return 0

    def check_integrity(self) -> None:
        self.slab.check_integrity()


class BlockRegion:
    """Blocks of several sizes in one region of buddies. Ids are names, not places: ``relocate`` keeps them.

    A block takes the next power of two of units that holds it. The unit is chosen so that the worst of the specs loses
    least; sizes that are halves of each other (BF16, FP8, INT4) lose nothing.
    """

    def __init__(self, capacity_bytes: int, specs: Sequence[BlockSpec], *, align_bytes: int = 256) -> None:
        if not specs or len(set(specs)) != len(specs):
            raise AllocationError("a region needs at least one kind of block, and each once")
        self.specs = tuple(specs)
        self.unit_bytes = unit_for([spec.size_bytes for spec in specs], align_bytes)
        self._orders = {spec: order_for(spec.size_bytes, self.unit_bytes) for spec in specs}
        units = capacity_bytes // self.unit_bytes
        if units < 1 << max(self._orders.values()):
            raise AllocationError(f"a region of {capacity_bytes} bytes has no room for one block of each of {specs}")
        self.capacity_bytes = units * self.unit_bytes
        self._buddy = BuddyAllocator(units)
        self._names = SlabAllocator(units)
        self._places: dict[BlockId, tuple[int, BlockSpec]] = {}
        self._at: dict[int, BlockId] = {}
        self._moving: dict[BlockId, BlockId] = {}
        """The nameless block that one is being copied to; forgotten when the block ends before its copy does."""

    @property
    def units(self) -> int:
        """How many units the region has."""
        return self._buddy.units

    @property
    def resident_blocks(self) -> int:
        """See ``BlockSpace``; the destination of a move under way counts as a block."""
        return len(self._places)

    @property
    def free_bytes(self) -> int:
        """See ``BlockSpace``."""
        return self._buddy.free_units * self.unit_bytes

    @property
    def stored_bytes(self) -> int:
        """See ``BlockSpace``. O(resident blocks)."""
        return sum(spec.size_bytes for _, spec in self._places.values())

    def available(self, spec: BlockSpec) -> int:
        return self._buddy.available(self.order(spec))

    def allocate(self, spec: BlockSpec, count: int) -> list[BlockId] | NoSpace:
        starts = self._buddy.allocate(count, order=self.order(spec))
        if isinstance(starts, NoSpace):
            return starts
        names = self._names.allocate(count)
        if isinstance(names, NoSpace):
            raise AssertionError("a region has more blocks than units")  # noqa: TRY004 - no caller can cause it
        blocks = cast("list[BlockId]", names)
        self._places.update(zip(blocks, zip(starts, repeat(spec)), strict=False))
        self._at.update(zip(starts, blocks, strict=True))
        return blocks

    def free(self, blocks: Sequence[BlockId]) -> None:
        self._names.free(blocks)
        starts_of: dict[int, list[int]] = {}
        for block in blocks:
            start, spec = self._places.pop(block)
            del self._at[start]
            starts_of.setdefault(self._orders[spec], []).append(start)
        for order, starts in starts_of.items():
            self._buddy.free(starts, order=order)
        for block in self._moving.keys() & blocks:
            del self._moving[block]

    def holds(self, blocks: Iterable[BlockId]) -> bool:
        return self._names.holds(blocks)

    def spec(self, block: BlockId) -> BlockSpec:
        return self._place(block)[1]

    def offset_bytes(self, block: BlockId) -> int:
        return self._place(block)[0] * self.unit_bytes

    def reserved_bytes(self, blocks: Sequence[BlockId]) -> int:
        places, orders = self._places, self._orders
        return sum(1 << orders[places[block][1]] for block in blocks) * self.unit_bytes

    def placed(self) -> list[PlacedBlock]:
        return [PlacedBlock(block, start, self._orders[spec]) for block, (start, spec) in self._places.items()]

    def neighbours(self, block: BlockId, order: int) -> list[BlockId]:
        start, spec = self._place(block)
        if self._orders[spec] >= order:
            return [block]
        first = start >> order << order
        starts = [unit for unit in range(first, first + (1 << order)) if unit in self._at]
        return [self._at[unit] for unit in starts]

    def order(self, spec: BlockSpec) -> int:
        order = self._orders.get(spec)
        if order is None:
            raise AllocationError(f"{spec} in a space of {', '.join(map(str, self.specs))}")
        return order

    def is_moving(self, block: BlockId) -> bool:
        """Whether a move of the block is under way."""
        return block in self._moving

    def begin_move(self, block: BlockId, start: int) -> BlockId:
        """Reserve the run at ``start`` for a copy of the block: as a block of its own, whose id is returned.

        ``AllocationError`` if the run isn't free or the block is being moved already.
        """
        spec = self.spec(block)
        if block in self._moving:
            raise AllocationError(f"block {block} is being moved already")
        self._buddy.take(start, order=self._orders[spec])
        names = self._names.allocate(1)
        if isinstance(names, NoSpace):
            raise AssertionError("a region has more blocks than units")  # noqa: TRY004 - no caller can cause it
        target = BlockId(names[0])
        self._places[target] = (start, spec)
        self._at[start] = target
        self._moving[block] = target
        return target

    def finish_move(self, block: BlockId, target: BlockId, *, adopt: bool) -> bool:
        """Let the block live where ``target`` is if ``adopt``, and end ``target``; True if the block moved.

        A block that ended meanwhile, or whose id is another block's now, doesn't move.
        """
        moves = adopt and self._moving.get(block) == target
        if self._moving.get(block) == target:
            del self._moving[block]
        if moves:
            places = self._places
            places[block], places[target] = places[target], places[block]
            self._at[places[block][0]], self._at[places[target][0]] = block, target
        self.free([target])
        return moves

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other. O(units)."""
        self._buddy.check_integrity()
        self._names.check_integrity()
        must(self._names.used == len(self._places), "a name without a place")
        moving = self._moving.keys() | self._moving.values()
        must(moving <= self._places.keys(), "a block that isn't there is being moved, or to nowhere")
        must(self._moving.keys() <= self._places.keys(), "a block that isn't there is being moved")
        taken = sum(1 << block.order for block in self.placed())
        must(all(self._at[start] == block for block, (start, _) in self._places.items()), "a place names another block")
        must(len(self._at) == len(self._places), "a place names a block that isn't there")
        must(taken == self._buddy.used_units, "units are in use without a block, or free with one")

    def _place(self, block: BlockId) -> tuple[int, BlockSpec]:
        place = self._places.get(block)
        if place is None:
            raise AllocationError(f"block {block} is not resident")
        return place


def order_for(size_bytes: int, unit_bytes: int) -> int:
    """Return the smallest power of two of units that holds a size."""
    return (-(-size_bytes // unit_bytes) - 1).bit_length()


def unit_for(sizes_bytes: Sequence[int], align_bytes: int) -> int:
    """Return the unit, a multiple of ``align_bytes``, with which the worst of the sizes loses least to rounding.

    Each size proposes itself, halved until no size is below it; of equals the largest is taken.
    """

    def aligned(size: int) -> int:
        return -(-size // align_bytes) * align_bytes

    smallest = min(sizes_bytes)
    proposals = set()
    for size in sizes_bytes:
        halvings = max(0, (size // smallest).bit_length() - 1)
        proposals.add(aligned(-(-size >> halvings)))
        proposals.add(aligned(-(-size >> (halvings + 1))))

    def worst_loss(unit: int) -> float:
        return max((unit << order_for(size, unit)) / size for size in sizes_bytes)

    return min(proposals, key=lambda unit: (worst_loss(unit), -unit))
