"""Host memory in block slots: the DDR tier, and the pivot of every transfer."""

import ctypes
import mmap
import sys
from collections.abc import Callable
from contextlib import suppress

from kvcontrol.kv_runtime.block_file import BlockFile, BlockFileSpec, padded
from kvcontrol.kv_runtime.errors import ArenaError, BlockFileError
from kvcontrol.kv_runtime.header import decode_header, encode_header
from kvcontrol.kv_runtime.record import BlockSeal, Recovered


class HostArena:
    """``slots`` slots of ``block_bytes`` in one mapping. The caller manages the use of slots.

    Slot ``n`` begins ``n * pitch_bytes`` after slot 0, at a multiple of ``PAGE_BYTES``, and owns its last page whole.

    The memory is the process's own, unless it was made by ``in_file``: then it is a file in shared memory, and blocks
    that were sealed in it are found again by the next process (``recover``), however this one ended.

    Raises ``ArenaError`` when the memory can't be had.
    """

    def __init__(self, *, slots: int, block_bytes: int, file: BlockFile | None = None) -> None:
        if slots <= 0 or block_bytes <= 0:
            raise ArenaError(f"an arena of {slots} slots of {block_bytes} bytes; both must be > 0")
        self.slots = slots
        self.block_bytes = block_bytes
        self.pitch_bytes = padded(block_bytes) if file is None else file.spec.slot_bytes
        self._first = 0 if file is None else file.spec.payload_at(0)
        self._header_bytes = 0 if file is None else file.spec.header_bytes
        self._blank = bytes(self._header_bytes)
        self.record_bytes = sys.maxsize if file is None else file.spec.record_bytes
        """What a block's tokens and its tenant's name may take together."""
        self._file = file
        try:
            if file is None:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._memory = mmap.mmap(-1, slots * self.pitch_bytes, flags=flags)
            else:
                self._memory = mmap.mmap(file.fd, file.spec.size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ArenaError(f"{slots * self.pitch_bytes} bytes of host memory can't be had: {error}") from error
        # A fork (a subprocess on its way to exec) would have to copy what a device has pinned, all of it, at once.
        self._memory.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError, AttributeError):  # a kernel without them: slower to pin and to check, nothing else
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        self._on_close: list[Callable[[], None]] = []

    @classmethod
    def in_file(cls, spec: BlockFileSpec) -> "HostArena":
        """Map a file, made where there is none, and used by one process at a time.

        It should lie in shared memory (``/dev/shm``): only there do blocks outlive the process, cost no disk writes
        and can be pinned. Its space is taken at once. Raises ``ArenaError`` for a file that is not ours to use (see
        ``BlockFile``).
        """
        if not spec.preallocate:
            raise ArenaError(f"{spec.path}: an arena's file is preallocated; a full disk would kill the process later")
        try:
            file = BlockFile(spec)
        except BlockFileError as error:
            raise ArenaError(str(error)) from error
        try:
            return cls(slots=spec.slots, block_bytes=spec.block_bytes, file=file)
        except ArenaError:
            file.close()
            raise

    @property
    def durable(self) -> bool:
        """Whether sealed blocks are found again after this process."""
        return self._file is not None

    @property
    def address(self) -> int:
        """Address of slot 0 in this process's memory; hold a view of the used slots while you use it."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + self._first

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes, writable; raises ``IndexError`` for a slot that isn't there."""
        start = self._start(slot)
        return self._view[start : start + self.block_bytes]

    def pages(self, slot: int) -> memoryview:
        """Return a slot's bytes to the end of its last page, for direct I/O; ``IndexError`` as ``view``."""
        start = self._start(slot)
        return self._view[start : start + padded(self.block_bytes)]

    def whole(self) -> memoryview:
        """Return everything from slot 0 on; slot ``n`` begins at ``n * pitch_bytes``. For native code."""
        return self._view[self._first :]

    def seal(self, slot: int, seal: BlockSeal) -> None:
        """Mark a slot as holding this whole block. Recovery finds the last seal.

        Does nothing in memory of the process's own. ``ValueError`` as ``encode_header``.
        """
        header = self._header(slot)
        if self._file is not None:
            self._view[header] = encode_header(
                seal, slot=slot, payload_bytes=self.block_bytes, header_bytes=self._header_bytes
            )

    def unseal(self, slot: int) -> None:
        """Mark a slot as empty: before its bytes change, and when its block is dropped."""
        header = self._header(slot)
        if self._file is not None:
            self._view[header] = self._blank

    def recover(self) -> list[Recovered]:
        """Return the sealed blocks of an earlier process; verify their bytes against their seals before use."""
        if self._file is None or self._file.fresh:
            return []
        found = []
        for slot in range(self.slots):
            page = self._view[self._header(slot)]
            seal = decode_header(page, slot=slot, payload_bytes=self.block_bytes, header_bytes=self._header_bytes)
            if seal is not None:
                found.append(Recovered(slot, seal))
        return found

    def on_close(self, action: Callable[[], None]) -> None:
        """Call ``action`` before the memory is released, so that device registrations can be undone."""
        self._on_close.append(action)

    def close(self) -> None:
        """Release the memory; no views may exist (``BufferError`` otherwise). Idempotent. A file stays."""
        while self._on_close:
            self._on_close.pop()()
        self._view.release()
        self._memory.close()
        if self._file is not None:
            self._file.close()

    def _header(self, slot: int) -> slice:
        """Return where a slot's header lies: before its payload; nowhere in memory of the process's own."""
        start = self._start(slot)
        return slice(start - self._header_bytes, start)

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of an arena with {self.slots}")
        return self._first + slot * self.pitch_bytes
