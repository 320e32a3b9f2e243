"""Tiers of no memory: they remember which record a slot has, and every transfer ends at once and well.

For replays of traces and simulated engines, where the runtime's decisions are real and bytes are not. Bytes in the
arena stay what they are, so an arena of one-byte blocks will do.
"""

import sys
from collections.abc import Sequence

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Fence, Move
from kvcontrol.kv_runtime.record import BlockSeal, Recovered


class _Passed:
    """A fence of an engine that has no work queued."""

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - it has passed
        """See ``Fence``."""
        return True


class MetadataBackend:
    """Slots without contents; see ``KVBackendProtocol``. As an engine's its fences have passed when they are made."""

    def __init__(self, tier: CacheTier, *, capacity_blocks: int, block_bytes: int) -> None:
        self.tier = tier
        self.capacity_blocks = capacity_blocks
        self.block_bytes = block_bytes
        self.last_error = ""

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        self._check(moves, arena)
        for move in moves:
            arena.unseal(move.host)
        return [BlockStatus.OK] * len(moves)

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        self._check(moves, arena)
        return [BlockStatus.OK] * len(moves)

    def fence(self, *, grace_s: float = 0.0) -> Fence:  # noqa: ARG002 - nothing is ever under way
        """See ``EngineBackendProtocol``."""
        return _Passed()

    def close(self) -> None:
        """See ``KVBackendProtocol``."""

    def _check(self, moves: Sequence[Move], arena: HostArena) -> None:
        for move in moves:
            if not (0 <= move.slot < self.capacity_blocks and 0 <= move.host < arena.slots):
                raise IndexError(
                    f"slot {move.slot} of {self.capacity_blocks}, arena slot {move.host} of {arena.slots}: no such slot"
                )


class DurableMetadataBackend(MetadataBackend):
    """Seals blocks, tells the two blocks of a slot apart by their seals, and recovers them."""

    record_bytes = sys.maxsize

    def __init__(self, *, capacity_blocks: int, block_bytes: int) -> None:
        super().__init__(CacheTier.NVME, capacity_blocks=capacity_blocks, block_bytes=block_bytes)
        self._seals: dict[int, BlockSeal] = {}

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        super().read(moves, arena)
        statuses = [
            BlockStatus.OK if self._seals.get(move.slot) == move.seal else BlockStatus.CORRUPT for move in moves
        ]
        if BlockStatus.CORRUPT in statuses:
            self.last_error = "a slot holds another block than requested"
        return statuses

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        statuses = super().write(moves, arena)
        for move in moves:
            if move.seal is not None:
                self._seals[move.slot] = move.seal
        return statuses

    def recover(self) -> list[Recovered]:
        """See ``DurableBackendProtocol``."""
        return [Recovered(slot, seal) for slot, seal in sorted(self._seals.items())]

    def erase(self, slots: Sequence[int]) -> list[BlockStatus]:
        """See ``DurableBackendProtocol``."""
        for slot in slots:
            self._seals.pop(slot, None)
        return [BlockStatus.OK] * len(slots)

    def _check(self, moves: Sequence[Move], arena: HostArena) -> None:
        super()._check(moves, arena)
        for move in moves:
            if move.seal is None:
                raise ValueError(f"slot {move.slot}: a durable tier needs each block's seal")
