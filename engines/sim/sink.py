"""Who hears what an engine's cache gains and loses: the event log of a server, or a fleet's index directly."""

from collections.abc import Sequence
from typing import Protocol

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash

StoredBlock = tuple[BlockHash, BlockHash | None, bytes]
"""A block's name, its parent's (None for the first of a prompt), and its packed tokens (empty: not told)."""


class BlockSink(Protocol):
    """As ``engines.events.log.EventLog`` on its engine's side."""

    def stored_all(self, blocks: Sequence[StoredBlock], *, tier: CacheTier, adapter: str = "") -> None:
        """Blocks are readable in ``tier`` from now on, parents before children."""

    def removed_all(self, blocks: Sequence[BlockHash], *, tier: CacheTier) -> None:
        """Blocks are no longer readable in ``tier``."""

    def cleared(self) -> None:
        """Nothing is readable any more."""


class SilentSink:
    """Nobody listens."""

    def stored_all(self, blocks: Sequence[StoredBlock], *, tier: CacheTier, adapter: str = "") -> None:
        """See ``BlockSink``."""

    def removed_all(self, blocks: Sequence[BlockHash], *, tier: CacheTier) -> None:
        """See ``BlockSink``."""

    def cleared(self) -> None:
        """See ``BlockSink``."""
