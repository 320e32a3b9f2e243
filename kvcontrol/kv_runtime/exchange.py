"""Blocks that go to and come from another process's arena: slots to read from and to fill, lent for a while.

Who moves the bytes is somebody else, on a thread of its own; here is only which slots it may touch, and what becomes of
them. A slot that is lent, or waits to be filled, is given to nobody else until it comes back, whatever happens to its
block meanwhile. What was filled becomes a copy once its bytes are known to be those that were sealed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.kv_runtime.record import BlockRecord, BlockSeal, check_path
from kvcontrol.kv_runtime.residency import Residency
from kvcontrol.kv_runtime.resident import Block, Copy

_DDR: Final = CacheTier.DDR


class Short(StrEnum):
    """Why a path can be lent only in part, or not yet."""

    NOTHING = "nothing"
    """All of it is there."""
    ARRIVING = "arriving"
    """The next block is on its way to DDR."""
    BELOW = "below"
    """The next block lies in NVMe alone."""
    ABSENT = "absent"


class Standing(NamedTuple):
    """How far a path lies in DDR; ``below`` are its blocks that would have to be brought up from NVMe."""

    blocks: int
    short: Short
    below: list[BlockId]


class Lent(NamedTuple):
    """A block to read: the arena's ``slot`` holds the bytes that ``seal`` describes."""

    slot: int
    seal: BlockSeal
    block: Block
    copy: Copy


class Berth(NamedTuple):
    """A ``slot`` of the arena to fill with a block's bytes."""

    slot: int
    block: Block
    copy: Copy


class Exchange:
    """See the module's text. ``on_arrival`` receives blocks that arrived. Not thread-safe; O(1) a block."""

    def __init__(
        self, residency: Residency, *, on_arrival: Callable[[Iterable[Block]], None], record_bytes: int
    ) -> None:
        self._residency = residency
        self._record_bytes = record_bytes
        self._on_arrival = on_arrival
        self._lent: dict[Copy, int] = {}
        self._berths: dict[int, Copy] = {}

    def __len__(self) -> int:
        """Return how many slots are out."""
        return len(self._lent) + len(self._berths)

    def is_arriving(self, key: BlockHash) -> bool:
        """Whether a block is on its way here, from wherever."""
        block = self._residency.of_key(key)
        return block is not None and block.arriving > 0 and not block.copies

    def standing(self, path: Sequence[BlockHash]) -> Standing:
        """Return how much of a path could be lent now."""
        below: list[BlockId] = []
        ready, short = 0, Short.NOTHING
        for key in path:
            block = self._residency.of_key(key)
            if block is not None and _DDR in block.copies:
                ready += short is Short.NOTHING
                continue
            if block is not None and block.readable:
                below.append(block.block_id)
                short = Short.BELOW if short is Short.NOTHING else short
                continue
            if short is Short.NOTHING:
                short = Short.ABSENT if block is None or not block.arriving else Short.ARRIVING
            break
        return Standing(ready, short, below)

    def lend(self, path: Sequence[BlockHash]) -> list[Lent]:
        """Return a path's blocks up to the first that is not in DDR; their slots stay as they are until ``back``."""
        lent = []
        for key in path:
            block = self._residency.of_key(key)
            copy = None if block is None else block.copies.get(_DDR)
            if block is None or copy is None or block.checksum is None:
                break
            copy.pins += 1
            self._residency.keep(block, copy)
            self._lent[copy] = self._lent.get(copy, 0) + 1
            lent.append(Lent(copy.slot, BlockSeal(block.record, block.checksum), block, copy))
        return lent

    def back(self, lent: Iterable[Lent]) -> None:
        """Take back what ``lend`` gave."""
        for _, _, block, copy in lent:
            readers = self._lent.pop(copy) - 1
            if readers:
                self._lent[copy] = readers
            self._residency.let_go(block, copy)
            self._residency.unpin(copy)

    def expect(self, records: Sequence[BlockRecord]) -> list[Berth]:
        """Return slots for blocks of one path and tenant, in order, as far as there is room; all of them come back with
        ``arrived``. Ends at a block that is there or on its way. ``ValueError`` for records that none can keep.
        """
        check_path(records, record_bytes=self._record_bytes)
        fresh: list[BlockRecord] = []
        for record in records:
            if self._residency.of_key(record.key) is not None:
                break
            fresh.append(record)
        if not fresh:
            return []
        berths = []
        for record, copy in zip(fresh, self._residency.reserve(_DDR, fresh[0].tenant, len(fresh)), strict=False):
            block = self._residency.new(record)
            block.arriving += 1
            copy.pins += 1
            self._berths[copy.slot] = copy
            berths.append(Berth(copy.slot, block, copy))
        return berths

    def arrived(self, berths: Sequence[Berth], checksums: Sequence[int]) -> list[BlockId]:
        """Take back what ``expect`` gave: the first ``len(checksums)`` hold bytes with these checksums, the others
        nothing. Returns the blocks that are there now.
        """
        landed = []
        for place, (slot, block, copy) in enumerate(berths):
            del self._berths[slot]
            copy.pins -= 1
            block.arriving -= 1
            if place < len(checksums) and not block.dropped:
                block.checksum = checksums[place]
                landed.append((block, copy))
            else:
                self._residency.discard(copy)
        if landed:
            self._residency.land(landed)
        for _, block, _ in berths:
            self._residency.settle(block)
        self._on_arrival([block for block, _ in landed])
        return [block.block_id for block, _ in landed]

    def copies(self) -> Iterator[Copy]:
        """Return every copy whose slot another party may access."""
        yield from self._lent
        yield from self._berths.values()
