"""Blocks in a file: the NVMe tier.

A write blanks the slot's header, writes the payload, then the new header: a process that dies in between leaves an
empty slot. A read fetches header and payload with one call and compares both with the seal that the caller has: a slot
that was reused, torn, truncated or flipped a bit is ``CORRUPT``, never another block's bytes. Nothing is synced on the
way: after a power failure a header may have reached the disk before its payload, which the checksum finds; a cache that
forgets costs a recompute, one that syncs each block costs its bandwidth.

Moves whose slots follow each other go with one call: disks like large requests, and each return into the interpreter
beside a busy engine loop costs milliseconds. When such a call fails, its blocks are tried one by one.

Direct I/O is used where the filesystem has it (``direct``): blocks are re-read from the arena, not from the page cache,
which would hold a second copy of them. A file that is deleted or replaced under the process keeps serving from the open
one; the next start finds whatever lies at the path then.
"""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Move
from kvcontrol.kv_runtime.block_file import BlockFile, BlockFileSpec, aligned_pages
from kvcontrol.kv_runtime.errors import BackendError, BlockFileError
from kvcontrol.kv_runtime.header import PAGE_BYTES, decode_header, encode_header
from kvcontrol.kv_runtime.record import Recovered, checksum

_SCAN_THREADS = 8
_SCAN_SLOTS = 256
_RUN_BLOCKS = 32
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _Item(NamedTuple):
    slot: int
    host: int
    header: bytes
    checksum: int


class FileBackend:
    """The slots of one file, whose folder is made if need be.

    A file with blocks of another owner is refused, never overwritten; one of the same owner with blocks that are of no
    more use begins anew. Its capacity may change from one start to the next. Raises ``BackendError``, see ``BlockFile``
    for why.
    """

    tier = CacheTier.NVME

    def __init__(self, spec: BlockFileSpec) -> None:
        self.capacity_blocks = spec.slots
        self.block_bytes = spec.block_bytes
        self.record_bytes = spec.record_bytes
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
        self._thread = threading.local()
        self._empty = aligned_pages(spec.header_bytes // PAGE_BYTES)

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        items = self._items(moves, arena)
        for item in items:
            arena.unseal(item.host)
        return [status for run in _runs(items) for status in self._read(run, arena)]

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        items = self._items(moves, arena)
        return [status for run in _runs(items) for status in self._write(run, arena)]

    def recover(self) -> list[Recovered]:
        """See ``DurableBackendProtocol``. Reads one header a slot, several slots at a time."""
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

    def _items(self, moves: Sequence[Move], arena: HostArena) -> list[_Item]:
        """Return the moves with the header that each slot has or gets, after looking for the caller's errors."""
        if arena.block_bytes != self.block_bytes:
            raise ValueError(f"an arena with blocks of {arena.block_bytes} bytes, here {self.block_bytes}")
        items = []
        for slot, host, seal in moves:
            self._check(slot)
            if not 0 <= host < arena.slots:
                raise IndexError(f"slot {host} of an arena with {arena.slots}")
            if seal is None:
                raise ValueError(f"slot {slot}: a file keeps no block without its seal")
            header = encode_header(
                seal, slot=slot, payload_bytes=self.block_bytes, header_bytes=self._spec.header_bytes
            )
            items.append(_Item(slot, host, header, seal.checksum))
        return items

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.capacity_blocks:
            raise IndexError(f"slot {slot} of a file with {self.capacity_blocks}")

    def _read(self, run: Sequence[_Item], arena: HostArena) -> list[BlockStatus]:
        """Read neighbouring slots with one call."""
        first = run[0].slot
        with ExitStack() as views:
            pages = self._pages(views, len(run))
            buffers = []
            for page, item in zip(pages, run, strict=True):
                buffers += [page, views.enter_context(arena.pages(item.host))]
            try:
                whole = _read_fully(self._file.fd, buffers, self._spec.header_at(first))
            except OSError as error:
                if len(run) == 1:
                    return [self._broken("read", first, error)]
                whole = False
            if whole:
                return [self._verified(item, page, arena) for page, item in zip(pages, run, strict=True)]
        if len(run) == 1:
            return [self._corrupt(first, "the file ends before it")]
        return [status for item in run for status in self._read([item], arena)]

    def _verified(self, item: _Item, page: memoryview, arena: HostArena) -> BlockStatus:
        if page != item.header:
            return self._corrupt(item.slot, "it holds another block, or none")
        with arena.view(item.host) as block:
            if checksum(block) != item.checksum:
                return self._corrupt(item.slot, "its bytes are not those that were written")
        return BlockStatus.OK

    def _write(self, run: Sequence[_Item], arena: HostArena) -> list[BlockStatus]:
        """Write neighbouring slots with one call, and then their headers."""
        first = run[0].slot
        with ExitStack() as views:
            empty = views.enter_context(memoryview(self._empty))
            buffers = []
            for item in run:
                buffers += [empty, views.enter_context(arena.pages(item.host))]
            try:
                _write_fully(self._file.fd, buffers, self._spec.header_at(first))
            except OSError as error:
                if len(run) == 1:
                    return [self._broken("write", first, error)]
            else:
                (page,) = self._pages(views, 1)
                return [self._seal(item, page) for item in run]
        return [status for item in run for status in self._write([item], arena)]

    def _seal(self, item: _Item, page: memoryview) -> BlockStatus:
        page[:] = item.header
        try:
            _write_fully(self._file.fd, [page], self._spec.header_at(item.slot))
        except OSError as error:
            return self._broken("write", item.slot, error)
        return BlockStatus.OK

    def _clear(self, slot: int) -> BlockStatus:
        try:
            with memoryview(self._empty) as page:
                _write_fully(self._file.fd, [page], self._spec.header_at(slot))
        except OSError as error:
            return self._broken("erase", slot, error)
        return BlockStatus.OK

    def _scan(self, start: int) -> list[Recovered]:
        found = []
        with ExitStack() as views:
            (page,) = self._pages(views, 1)
            for slot in range(start, min(start + _SCAN_SLOTS, self.capacity_blocks)):
                try:
                    count = os.preadv(self._file.fd, [page], self._spec.header_at(slot))
                except OSError as error:
                    self._broken("recover", slot, error)
                    continue
                seal = decode_header(
                    page[:count], slot=slot, payload_bytes=self.block_bytes, header_bytes=self._spec.header_bytes
                )
                if seal is not None:
                    found.append(Recovered(slot, seal))
        return found

    def _pages(self, views: ExitStack, count: int) -> list[memoryview]:
        """Return room for headers, the calling thread's own, that direct I/O can use."""
        size = self._spec.header_bytes
        memory = getattr(self._thread, "pages", None)
        if memory is None:
            memory = self._thread.pages = aligned_pages(_RUN_BLOCKS * size // PAGE_BYTES)
        whole = views.enter_context(memoryview(memory))
        starts = range(0, count * size, size)
        return [views.enter_context(whole[start : start + size]) for start in starts]

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
        _skip(buffers, count)
    return True


def _write_fully(fd: int, buffers: list[memoryview], offset: int) -> None:
    """Write all of the buffers; a full disk shows as an ``OSError`` once nothing more goes in."""
    while buffers:
        count = os.pwritev(fd, buffers, offset)
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        offset += count
        _skip(buffers, count)


def _skip(buffers: list[memoryview], count: int) -> None:
    """Take the first ``count`` bytes away."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]


def _runs(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Cut moves where the next slot doesn't follow, and where one call would get too long."""
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or end - start == _RUN_BLOCKS or items[end].slot != items[end - 1].slot + 1:
            yield items[start:end]
            start = end
