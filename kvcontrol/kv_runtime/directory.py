"""Queries about the blocks below the engine's memory."""

from collections.abc import Iterator, Sequence
from typing import Final

from kvcontrol.core.blocks import CacheTier, KVBlockInfo
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.kv_runtime.lookup import Run, Survey, find_run, survey_path
from kvcontrol.kv_runtime.migrator import KVMigrator
from kvcontrol.kv_runtime.record import BlockRecord
from kvcontrol.kv_runtime.residency import Residency

_HBM: Final = CacheTier.HBM
_DDR: Final = CacheTier.DDR
_NVME: Final = CacheTier.NVME


class Directory:
    """The read-only part of ``HierarchyManager``; ``get_block_info`` and ``locate`` may be called from any thread.

    A block that is named stays where it is until the owner's next call of something that moves.
    """

    def __init__(self, residency: Residency, migrator: KVMigrator, *, block_bytes: int) -> None:
        self._residency = residency
        self._migrator = migrator
        self._block_bytes = block_bytes
        self._surveyed_collisions = 0

    def find(self, key: BlockHash) -> BlockId | None:
        """Return the block of a key, if it can be read. Compare ``record(id).tokens`` before it is used. O(1)."""
        block = self._residency.of_key(key)
        return block.block_id if block is not None and block.readable else None

    def find_run(self, keys: Sequence[BlockHash], tokens: Sequence[bytes], first: int, limit: int) -> Run:
        """See ``lookup.find_run``."""
        return find_run(self._residency, keys, tokens, first, limit)

    def survey(self, keys: Sequence[BlockHash], tokens: Sequence[bytes], limit: int) -> Survey:
        """See ``lookup.survey``; another lineage counts as a collision."""
        survey = survey_path(self._residency, keys, tokens, limit)
        self._surveyed_collisions += survey.collided
        return survey

    def held(self) -> list[BlockId]:
        """Return the blocks that callers hold. O(blocks)."""
        return [block.block_id for block in self._residency.all() if block.claims]

    def record(self, block_id: BlockId) -> BlockRecord | None:
        """Return the record of a block; None if it isn't resident."""
        block = self._residency.get(block_id)
        return None if block is None else block.record

    def blocks(self) -> Iterator[tuple[BlockId, BlockRecord]]:
        """Iterate over all blocks that can be read; the owner's thread, no other call in between."""
        return ((block.block_id, block.record) for block in self._residency.blocks() if block.readable)

    def locate(self, block_id: BlockId) -> tuple[CacheTier, ...]:
        """Return the tiers that a block can be read from, fastest first; any thread."""
        block = self._residency.get(block_id)
        copies = () if block is None else tuple(block.copies)
        return tuple(tier for tier in (_DDR, _NVME) if tier in copies)

    def get_block_info(self, block_id: BlockId) -> KVBlockInfo | None:
        """Return a block's data for operators, in its fastest tier; any thread."""
        tiers = self.locate(block_id)
        block = self._residency.get(block_id)
        if block is None or not tiers:
            return None
        return KVBlockInfo(
            block_id=block_id,
            tier=tiers[0],
            size_bytes=self._block_bytes,
            tenant_id=block.record.tenant,
            last_access_s=block.last_access_s,
        )

    def estimate_load_s(self, block_ids: Sequence[BlockId]) -> float | None:
        """Return how long a load would take from now on, as measured lately; None where nothing was, or not all is."""
        found = list(map(self._residency.get, block_ids))
        below = 0
        for block in found:
            if block is None:
                return None
            if _DDR not in block.copies:
                if not block.readable:
                    return None
                below += 1
        times = [self._migrator.seconds_for(_DDR, _HBM, len(found))]
        if below:
            times.append(self._migrator.seconds_for(_NVME, _HBM, below))
        known = [seconds for seconds in times if seconds is not None]
        return max(known) if len(known) == len(times) else None
