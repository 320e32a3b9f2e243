"""The seam between the runtime and memory: a tier moves blocks to and from the slots of one host arena.

Host memory is the pivot of every path, because it is on all of them: engine memory and disks both read and write it,
never each other. The arena *is* the DDR tier's memory, so a block in DDR needs no backend of its own.

    HBM  -- read  --> arena        save          NVMe -- read  --> arena        promotion
    HBM  <- write --- arena        load          NVMe <- write --- arena        demotion
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.record import BlockSeal


class BlockStatus(StrEnum):
    """How the transfer of one block ended. All but ``OK`` mean: its bytes must not be used."""

    OK = "ok"
    FAILED = "failed"
    """The device refused or broke off."""
    CORRUPT = "corrupt"
    """Bytes came, but not those that were stored."""
    NO_SPACE = "no_space"
    """The destination is full."""
    CANCELLED = "cancelled"
    """Nobody wants it any more; it was not moved."""
    LATE = "late"
    """Its deadline passed before it was moved."""


class Move(NamedTuple):
    """One block of a transfer: the tier's ``slot`` and the arena's ``host`` slot.

    ``seal`` is what the bytes must be (read below HBM) or are (write); None where a block is read from the engine for
    the first time.
    """

    slot: int
    host: int
    seal: BlockSeal | None = None


class Fence(Protocol):
    """A moment in an engine's work, for instance "this forward has written its KV"."""

    def wait(self, timeout_s: float) -> bool:
        """Block until the moment has passed, without holding the GIL; False after ``timeout_s``."""


class KVBackendProtocol(Protocol):
    """The memory of one tier: ``capacity_blocks`` slots of ``block_bytes``.

    ``read`` and ``write`` block until done, release the GIL for the bulk of the work, and may be called from several
    threads for distinct slots. They return one status a move, in order, and raise nothing that a device can cause.
    A slot outside of ``range(capacity_blocks)`` is the caller's error (``IndexError``).
    """

    tier: CacheTier
    capacity_blocks: int
    block_bytes: int

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """Copy slots into the arena. A durable tier returns ``CORRUPT`` where the slot holds another record."""

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """Copy from the arena into slots; a durable tier keeps each move's seal with it."""

    def close(self) -> None:
        """Let go of memory, files and threads; idempotent."""


class Recovered(NamedTuple):
    """A block found again after a restart. Its record is intact; its bytes are verified when they are read."""

    slot: int
    seal: BlockSeal


class DurableBackendProtocol(KVBackendProtocol, Protocol):
    """A tier whose contents outlive the process."""

    def recover(self) -> list[Recovered]:
        """Return what is found at the start; slots with a torn or foreign record are empty."""

    def erase(self, slots: Sequence[int]) -> None:
        """Make sure that slots are not found by a later ``recover``."""


__all__ = [
    "BlockStatus",
    "DurableBackendProtocol",
    "Fence",
    "KVBackendProtocol",
    "Move",
    "Recovered",
]
