"""What an engine's cache gains and loses goes straight into the gateway's index: no socket, no delay."""

from collections.abc import Sequence

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.events import AllBlocksCleared, BlockRemoved
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex


class IndexSink:
    """A ``BlockSink`` of one instance."""

    def __init__(self, index: FleetIndex, instance: InstanceId) -> None:
        self._index = index
        self._instance = instance

    def stored_all(
        self, blocks: Sequence[tuple[BlockHash, BlockHash | None, bytes]], *, tier: CacheTier, adapter: str = ""
    ) -> None:
        """See ``BlockSink``."""
        del adapter
        self._index.extend(self._instance, tier, [(block, parent) for block, parent, _ in blocks])

    def removed_all(self, blocks: Sequence[BlockHash], *, tier: CacheTier) -> None:
        """See ``BlockSink``."""
        self._index.apply(self._instance, BlockRemoved(block_hashes=tuple(blocks), tier=tier))

    def cleared(self) -> None:
        """See ``BlockSink``."""
        self._index.apply(self._instance, AllBlocksCleared())
