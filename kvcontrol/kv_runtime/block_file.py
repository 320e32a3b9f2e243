"""A file of block slots, for disk tiers and for shared host memory.

    superblock | header 0 | payload 0 | header 1 | payload 1 | ...

Everything begins at a multiple of a page. The superblock says whose blocks these are, a digest of what makes bytes
interchangeable, and their size; the number of slots may change from one opening to the next. The file belongs to the
server's user alone (0600) and to one process at a time (``flock``).

A file of the same owner whose blocks are of no more use (other weights, another configuration) begins anew: nobody
could ever find them. A file of another owner is refused and left alone.

Rejected: all headers in one table (a scan at the start would be sequential, but every read of a block would be two),
one file a block (a directory of a million names, an open and a close each).
"""

import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvcontrol.kv_runtime.errors import BlockFileError
from kvcontrol.kv_runtime.header import HEADER_BYTES, PAGE_BYTES, variable_bytes

MAX_IDENTITY_BYTES = 32

_KIND = b"kvfile\x00"
_MAGIC = _KIND + b"\x02"
_CHECKSUM = struct.Struct("<Q")
_SUPERBLOCK = struct.Struct(f"<8sQQQB{MAX_IDENTITY_BYTES}s")
_LOCK_POLL_S = 0.05
_NO_PREALLOCATION = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_NO_DIRECT_IO = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

_log = logging.getLogger(__name__)


def padded(block_bytes: int) -> int:
    """Return the bytes of the whole pages that a block takes."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def aligned_pages(count: int) -> mmap.mmap:
    """Return pages of memory that direct I/O can use."""
    return mmap.mmap(-1, count * PAGE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFileSpec:
    """Path and layout of a block file.

    ``identity`` (1 to 32 bytes, with ``owner``) is a digest of all that makes bytes of equal tokens interchangeable:
    model, weights, configuration, KV format and layout. ``owner`` names whose file it is, the served model for
    instance: a file of the same owner and other blocks begins anew; without one, any other file is refused.
    ``header_bytes`` are the pages before each block: ``header_bytes_for`` its tokens. ``preallocate`` takes the space
    at once, so that a full disk is found at the start; a thin file takes it as blocks come. ``lock_timeout_s`` is how
    long to wait for another process that has the file open (one that was just killed and is on its way out, say).

    Raises ``BlockFileError`` for a size or an identity out of range.
    """

    path: Path
    slots: int
    block_bytes: int
    identity: bytes
    owner: bytes = b""
    header_bytes: int = HEADER_BYTES
    preallocate: bool = True
    lock_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.slots <= 0 or self.block_bytes <= 0:
            raise BlockFileError(f"{self.path}: {self.slots} slots of {self.block_bytes} bytes; both must be > 0")
        if not 0 < len(self.owner + self.identity) <= MAX_IDENTITY_BYTES:
            raise BlockFileError(
                f"{self.path}: an identity of {len(self.owner + self.identity)} bytes; "
                f"1 to {MAX_IDENTITY_BYTES} are allowed"
            )
        if self.header_bytes < HEADER_BYTES or self.header_bytes % PAGE_BYTES:
            raise BlockFileError(
                f"{self.path}: headers of {self.header_bytes} bytes; they must be whole pages of {PAGE_BYTES}"
            )

    @property
    def slot_bytes(self) -> int:
        """From one slot to the next: a header and the block's pages."""
        return self.header_bytes + padded(self.block_bytes)

    @property
    def record_bytes(self) -> int:
        """Largest size of a block's tokens and its tenant's name together."""
        return variable_bytes(self.header_bytes)

    @property
    def size_bytes(self) -> int:
        """The whole file."""
        return PAGE_BYTES + self.slots * self.slot_bytes

    def header_at(self, slot: int) -> int:
        """Return where a slot's header begins in the file."""
        return PAGE_BYTES + slot * self.slot_bytes

    def payload_at(self, slot: int) -> int:
        """Return where a slot's payload begins in the file."""
        return self.header_at(slot) + self.header_bytes


class BlockFile:
    """The open, locked file of a ``BlockFileSpec``. ``fresh``: the file was created now and is empty.

    The number of slots follows the spec from one opening to the next: blocks in slots that went are gone.
    Raises ``BlockFileError`` for a file that is somebody else's, in use, of another owner's blocks or damaged, and for
    a disk that is too small.
    """

    def __init__(self, spec: BlockFileSpec) -> None:
        self.spec = spec
        try:
            self.fd = os.open(spec.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise BlockFileError(f"{spec.path} can't be opened: {error.strerror}") from error
        try:
            self._refuse_strangers()
            self._lock(spec.lock_timeout_s)
            self.fresh = os.fstat(self.fd).st_size == 0
            held = 0 if self.fresh else self._slots_inside()
            if held is None:
                os.ftruncate(self.fd, 0)
                self.fresh, held = True, 0
            self._resize(held)
        except OSError as error:
            self.close()
            raise BlockFileError(f"{spec.path} can't be set up: {error.strerror}") from error
        except BlockFileError:
            self.close()
            raise

    def direct(self) -> bool:
        """Let reads and writes pass by the page cache; False, and nothing changes, where the filesystem can't."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        page = aligned_pages(1)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self.fd, [page], 0)
        except OSError as error:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            if error.errno in _NO_DIRECT_IO:
                return False
            raise BlockFileError(f"{self.spec.path} can't be read: {error.strerror}") from error
        return True

    def close(self) -> None:
        """Let go of the file and its lock; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _refuse_strangers(self) -> None:
        found = os.fstat(self.fd)
        if not stat.S_ISREG(found.st_mode):
            raise BlockFileError(f"{self.spec.path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise BlockFileError(
                f"{self.spec.path} belongs to user {found.st_uid}; it must be the server's own ({os.geteuid()})"
            )
        if found.st_mode & 0o077:
            raise BlockFileError(
                f"{self.spec.path} is open to others (mode {found.st_mode & 0o777:o}); it holds prompts and must be 600"
            )

    def _lock(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BlockFileError(
                        f"{self.spec.path} is in use by another process; every instance needs its own"
                    ) from None
                time.sleep(_LOCK_POLL_S)
            else:
                return

    def _slots_inside(self) -> int | None:
        """Return the slots of the file, None for one of ours to clear; ``BlockFileError`` for other files."""
        remedy = "remove the file, or name another place"
        page = os.pread(self.fd, PAGE_BYTES, 0)
        body = page[_CHECKSUM.size : _CHECKSUM.size + _SUPERBLOCK.size]
        if body.startswith(_KIND) and not body.startswith(_MAGIC) and self.spec.owner:
            _log.warning("%s was written by another version of kvgate: the file is cleared", self.spec.path)
            return None
        if len(page) < PAGE_BYTES or not body.startswith(_MAGIC):
            raise BlockFileError(f"{self.spec.path} is not a store of KV blocks; {remedy}")
        if _CHECKSUM.unpack_from(page)[0] != xxhash.xxh3_64_intdigest(body):
            raise BlockFileError(f"{self.spec.path} has a damaged first page; {remedy}")
        _, slots, block_bytes, header_bytes, length, identity = _SUPERBLOCK.unpack(body)
        spec = self.spec
        held, wanted = identity[:length], spec.owner + spec.identity
        if (held, block_bytes, header_bytes) == (wanted, spec.block_bytes, spec.header_bytes):
            return int(slots)
        if spec.owner and held.startswith(spec.owner):
            _log.warning(
                "%s holds %d blocks of other weights or another configuration: the file is cleared",
                spec.path,
                slots,
            )
            return None
        if held != wanted:
            raise BlockFileError(
                f"{spec.path} holds blocks of another model or KV format ({held.hex()}, here {wanted.hex()}); {remedy}"
            )
        raise BlockFileError(
            f"{spec.path} holds blocks of {block_bytes} bytes, here {spec.block_bytes}, and headers of {header_bytes}, "
            f"here {spec.header_bytes}; {remedy}"
        )

    def _resize(self, held: int) -> None:
        spec = self.spec
        if held == 0:
            self._write_superblock(0)  # so that a file left behind half-made is known as ours
        if held > spec.slots:
            self._write_superblock(spec.slots)
            os.ftruncate(self.fd, spec.size_bytes)
        if spec.preallocate:
            self._preallocate(held)
        if os.fstat(self.fd).st_size < spec.size_bytes:
            os.ftruncate(self.fd, spec.size_bytes)
        self._write_superblock(spec.slots)

    def _preallocate(self, held: int) -> None:
        spec = self.spec
        try:
            os.posix_fallocate(self.fd, 0, spec.size_bytes)
        except OSError as error:
            if error.errno in _NO_PREALLOCATION:
                return
            os.ftruncate(self.fd, spec.header_at(held))
            disk = os.fstatvfs(self.fd)
            raise BlockFileError(
                f"{spec.path}: {spec.slots} blocks of {spec.block_bytes} bytes need {spec.size_bytes} bytes; "
                f"{disk.f_bavail * disk.f_frsize} are free ({error.strerror})"
            ) from error

    def _write_superblock(self, slots: int) -> None:
        spec = self.spec
        identity = spec.owner + spec.identity
        body = _SUPERBLOCK.pack(_MAGIC, slots, spec.block_bytes, spec.header_bytes, len(identity), identity)
        page = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) + body
        os.pwrite(self.fd, page.ljust(PAGE_BYTES, b"\0"), 0)
        os.fsync(self.fd)
