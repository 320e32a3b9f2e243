"""Blocks in a file: the NVMe tier.

A write takes the slot's old header away, writes the payload, then the new header: a process that dies in between leaves
an empty slot. A read fetches header and payload with one call and compares both with the seal that the caller has: a
slot that was reused, torn, truncated or flipped a bit is ``CORRUPT``, never another block's bytes. Nothing is synced
on the way: after a power failure a header may have reached the disk before its payload, which the checksum finds; a
cache that forgets costs a recompute, one that syncs each block costs its bandwidth.

Direct I/O is used where the filesystem has it (``direct``): blocks are re-read from the arena, not from the page cache,
which would hold a second copy of them. A file that is deleted or replaced under the process keeps serving from the open
one; the next start finds whatever lies at the path then.
"""

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Move
from kvcontrol.kv_runtime.block_file import BlockFile, BlockFileSpec, aligned_page
from kvcontrol.kv_runtime.errors import BackendError, BlockFileError
from kvcontrol.kv_runtime.header import EMPTY_HEADER, decode_header, encode_header
from kvcontrol.kv_runtime.record import BlockSeal, Recovered, checksum

_SCAN_THREADS = 8
_SCAN_SLOTS = 256
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FileBackend:
    """The slots of one file, whose folder is made if need be.

    A file with blocks of another identity or size is refused, never overwritten; its capacity may change from one start
    to the next. Raises ``BackendError``, see ``BlockFile`` for why.
    """

    tier = CacheTier.NVME

    def __init__(self, spec: BlockFileSpec) -> None:
        self.capacity_blocks = spec.slots
        self.block_bytes = spec.block_bytes
        self.last_error = ""
        self._spec = spec
        try:
            spec.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BackendError(f"{spec.path.parent} can't be made: {error.strerror}") from error
        try:
            self._file = BlockFile(spec)
        except BlockFileError as error:
            raise BackendError(str(error)) from error
        try:
            self.direct = self._file.direct()
        except BlockFileError as error:
            self._file.close()
            raise BackendError(str(error)) from error
        if not self.direct:
            os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_RANDOM)
        # Which slots may have a header in the file: all, until they were looked at.
        self._headed = bytearray(spec.slots) if self._file.fresh else bytearray(b"\1") * spec.slots
        self._pages = threading.local()
        self._empty = aligned_page()

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        headers = self._headers(moves, arena)
        statuses = []
        for move, (seal, header) in zip(moves, headers, strict=True):
            arena.unseal(move.host)
            statuses.append(self._read(move, seal, header, arena))
        return statuses

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        headers = self._headers(moves, arena)
        page = self._page()
        statuses = []
        for move, (_, header) in zip(moves, headers, strict=True):
            page[:] = header
            statuses.append(self._write(move.slot, page, arena, move.host))
        return statuses

    def recover(self) -> list[Recovered]:
        """See ``DurableBackendProtocol``. Reads one page a slot, several slots at a time."""
        if self._file.fresh:
            return []
        starts = range(0, self.capacity_blocks, _SCAN_SLOTS)
        with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="kv-recover") as pool:
            return [found for part in pool.map(self._scan, starts) for found in part]

    def erase(self, slots: Sequence[int]) -> list[BlockStatus]:
        """See ``DurableBackendProtocol``."""
        for slot in slots:
            self._check(slot)
        return [self._clear(slot) for slot in slots]

    def close(self) -> None:
        """See ``KVBackendProtocol``; the file stays."""
        self._file.close()

    def _headers(self, moves: Sequence[Move], arena: HostArena) -> list[tuple[BlockSeal, bytes]]:
        """Return the seal and the header that each slot has or gets, after looking for the caller's errors."""
        if arena.block_bytes != self.block_bytes:
            raise ValueError(f"an arena with blocks of {arena.block_bytes} bytes, here {self.block_bytes}")
        headers = []
        for move in moves:
            self._check(move.slot)
            if not 0 <= move.host < arena.slots:
                raise IndexError(f"slot {move.host} of an arena with {arena.slots}")
            if move.seal is None:
                raise ValueError(f"slot {move.slot}: a file keeps no block without its seal")
            headers.append((move.seal, encode_header(move.seal, slot=move.slot, payload_bytes=self.block_bytes)))
        return headers

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.capacity_blocks:
            raise IndexError(f"slot {slot} of a file with {self.capacity_blocks}")

    def _read(self, move: Move, seal: BlockSeal, header: bytes, arena: HostArena) -> BlockStatus:
        slot = move.slot
        page = self._page()
        with memoryview(page) as found, arena.pages(move.host) as payload, arena.view(move.host) as block:
            try:
                whole = _read_fully(self._file.fd, [found, payload], self._spec.header_at(slot))
            except OSError as error:
                return self._broken("read", slot, error)
            if not whole:
                return self._corrupt(slot, "the file ends before it")
            if found != header:
                return self._corrupt(slot, "it holds another block, or none")
            if checksum(block) != seal.checksum:
                return self._corrupt(slot, "its bytes are not those that were written")
        return BlockStatus.OK

    def _write(self, slot: int, header: mmap.mmap, arena: HostArena, host: int) -> BlockStatus:
        cleared = self._clear(slot)
        if cleared is not BlockStatus.OK:
            return cleared
        try:
            with arena.pages(host) as payload:
                _write_fully(self._file.fd, payload, self._spec.payload_at(slot))
            self._headed[slot] = 1  # before the call: it may have come through even if it fails
            with memoryview(header) as page:
                _write_fully(self._file.fd, page, self._spec.header_at(slot))
        except OSError as error:
            return self._broken("write", slot, error)
        return BlockStatus.OK

    def _clear(self, slot: int) -> BlockStatus:
        if not self._headed[slot]:
            return BlockStatus.OK
        try:
            with memoryview(self._empty) as page:
                _write_fully(self._file.fd, page, self._spec.header_at(slot))
        except OSError as error:
            return self._broken("clear", slot, error)
        self._headed[slot] = 0
        return BlockStatus.OK

    def _scan(self, start: int) -> list[Recovered]:
        page = self._page()
        found = []
        for slot in range(start, min(start + _SCAN_SLOTS, self.capacity_blocks)):
            try:
                count = os.preadv(self._file.fd, [page], self._spec.header_at(slot))
            except OSError as error:
                self._broken("recover", slot, error)
                continue
            content = page[:count]
            seal = decode_header(content, slot=slot, payload_bytes=self.block_bytes)
            if seal is not None:
                found.append(Recovered(slot, seal))
            elif content == EMPTY_HEADER:
                self._headed[slot] = 0
        return found

    def _page(self) -> mmap.mmap:
        page = getattr(self._pages, "page", None)
        if page is None:
            page = self._pages.page = aligned_page()
        return page

    def _broken(self, what: str, slot: int, error: OSError) -> BlockStatus:
        self.last_error = f"{self._spec.path}: {what} of slot {slot}: {error.strerror}"
        return BlockStatus.NO_SPACE if error.errno in _FULL else BlockStatus.FAILED

    def _corrupt(self, slot: int, why: str) -> BlockStatus:
        self.last_error = f"{self._spec.path}: slot {slot}: {why}"
        return BlockStatus.CORRUPT


def _read_fully(fd: int, buffers: list[memoryview], offset: int) -> bool:
    """Fill the buffers from ``offset`` on; False when the file ends before that."""
    while buffers:
        count = os.preadv(fd, buffers, offset)
        if count == 0:
            return False
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return True


def _write_fully(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; a full disk shows as an ``OSError`` once nothing more goes in."""
    while data:
        count = os.pwrite(fd, data, offset)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset += count
        data = data[count:]


__all__ = ["FileBackend"]
