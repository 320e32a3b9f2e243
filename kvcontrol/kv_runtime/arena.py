"""Host memory in block slots: the DDR tier, and the pivot of every transfer."""

import mmap

from kvcontrol.kv_runtime.errors import ArenaError

PAGE_BYTES = 4096
"""Slots begin at multiples of it, so that direct I/O and page-wise DMA can use them as they are."""


class HostArena:
    """``slots`` slots of ``block_bytes`` in one mapping. Who may use which slot is the caller's to know.

    Raises ``ArenaError`` when the memory can't be had.
    """

    def __init__(self, *, slots: int, block_bytes: int) -> None:
        if slots <= 0 or block_bytes <= 0:
            raise ArenaError(f"an arena of {slots} slots of {block_bytes} bytes; both must be > 0")
        self.slots = slots
        self.block_bytes = block_bytes
        self.pitch_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            self._memory = mmap.mmap(-1, slots * self.pitch_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ArenaError(f"{slots * self.pitch_bytes} bytes of host memory can't be had: {error}") from error
        self._view = memoryview(self._memory)

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes, writable; raises ``IndexError`` for a slot that isn't there."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of an arena with {self.slots}")
        start = slot * self.pitch_bytes
        return self._view[start : start + self.block_bytes]

    def close(self) -> None:
        """Give the memory back; views must be gone (``BufferError`` otherwise). Idempotent."""
        self._view.release()
        self._memory.close()


__all__ = ["PAGE_BYTES", "HostArena"]
