"""The seam between the runtime and memory: a tier moves blocks to and from the slots of one host arena.

Host memory is the pivot of every path, because it is on all of them: engine memory and disks both read and write it,
never each other. The arena *is* the DDR tier's memory, so a block in DDR needs no backend of its own.

    HBM  -- read  --> arena        save          NVMe -- read  --> arena        promotion
    HBM  <- write --- arena        load          NVMe <- write --- arena        demotion
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.record import BlockSeal, Recovered


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
    Nothing has been moved when a slot lies outside of ``range(capacity_blocks)`` or the arena (``IndexError``), or
    when a durable tier gets a move without a seal or one that it can't write down (``ValueError``): those are the
    caller's errors. ``last_error`` says in words what the latest ``FAILED``, ``CORRUPT`` or ``NO_SPACE`` was.
    """

    tier: CacheTier
    capacity_blocks: int
    block_bytes: int
    last_error: str

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """Copy slots into the arena, whose slots are unsealed first.

        A durable tier returns ``CORRUPT`` where the slot holds another record, or other bytes than its seal says.
        """

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """Copy from the arena into slots; a durable tier keeps each move's seal with it."""

    def close(self) -> None:
        """Let go of memory, files and threads, when no transfer is under way; idempotent."""


class EngineBackendProtocol(KVBackendProtocol, Protocol):
    """The engine's own memory, which kernels read and write concurrently."""

    def fence(self, *, grace_s: float = 0.0) -> Fence:
        """Return the end of all work that the engine has queued by now; called on the engine's thread, never waits.

        ``grace_s``: on a device that answers over the same link, so much later, for an answer to go first.

        A block is read after the fence of the work that wrote it, and written after the fence of the last work that
        may still read what it held before.
        """


@runtime_checkable
class OrderedBackendProtocol(EngineBackendProtocol, Protocol):
    """Engine memory on a device with queues: queued transfers are ordered before later kernels."""

    def write_in_order(self, moves: Sequence[Move], arena: HostArena, queued: Callable[[], None]) -> list[BlockStatus]:
        """As ``write``, and call ``queued`` in between: all of it is queued, so that ``join`` covers it.

        ``queued`` is called at most once, on the calling thread, before ``write_in_order`` returns; never when the
        device has refused, and never where writes are done when they are asked for.
        """

    def join(self) -> None:
        """Let whatever the engine queues from now on wait, on the device, for all writes that are queued by now.

        Called on the engine's thread; never waits. ``BackendError`` when the device refuses.
        """


class DurableBackendProtocol(KVBackendProtocol, Protocol):
    """A tier whose contents outlive the process; ``record_bytes`` bounds a block's tokens and tenant name."""

    record_bytes: int

    def recover(self) -> list[Recovered]:
        """Return the blocks found at the start; slots with a torn or foreign record are empty.

        A key may be found in more than one slot. Not to be called beside ``read`` and ``write``.
        """

    def erase(self, slots: Sequence[int]) -> list[BlockStatus]:
        """Keep slots from being found by a later ``recover``; return whether that succeeded."""
