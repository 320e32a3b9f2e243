"""Blocks that callers protect from eviction, each as often as it was claimed.

A ticket's holds end with the ticket; a claim ends with ``release`` alone, and never more often than it was made.
"""

from collections.abc import Sequence

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime.residency import Residency


class Claims:
    """See the module's text. Not thread-safe."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def hold(self, block_ids: Sequence[BlockId]) -> tuple[BlockId, ...]:
        """Protect blocks from eviction until ``release``; returns the resident ones, now held."""
        check_distinct(block_ids)
        found = map(self._residency.get, block_ids)
        held = [block for block in found if block is not None and (CacheTier.DDR in block.copies or block.readable)]
        self._residency.hold(held)
        for block in held:
            block.claims += 1
        return tuple([block.block_id for block in held])

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Undo one ``hold`` of each; they count as used now."""
        check_distinct(block_ids)
        held = [block for block in map(self._residency.get, block_ids) if block is not None and block.claims]
        if len(held) != len(block_ids):  # a block that is held has not been forgotten
            there = {block.block_id for block in held}
            strange = next(block_id for block_id in block_ids if block_id not in there)
            raise ValueError(f"block {strange} is released and not held")
        for block in held:
            block.claims -= 1
        self._residency.release(held)


def check_distinct(block_ids: Sequence[BlockId]) -> None:
    """Raise ``ValueError`` for a block that is named twice."""
    if len(set(block_ids)) != len(block_ids):
        raise ValueError("a block is named twice; each may come once")
