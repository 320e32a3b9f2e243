"""Notices when the log of a SQLite store (``-wal``) or the index of the log (``-shm``) is lost under a connection.

Without its name a log has changes that nobody finds after a restart, and without a common index two processes do not
see each other's changes. While a connection is open, SQLite itself neither removes nor replaces these files, and the
log is never shorter than its index promises (https://www.sqlite.org/walformat.html).

Only SQLite may open the index in this process: closing another descriptor of it would drop all of SQLite's locks (a
property of POSIX locks). So the index is read through SQLite's own descriptor. SQLite locks nothing in the log.
"""

import os
import struct
from contextlib import suppress
from pathlib import Path
from time import time_ns
from typing import Final, NamedTuple

_ATTEMPTS: Final = 20
_HEADER_BYTES: Final = 48
"""The header of the index: it is there twice, and both are the same unless SQLite writes it now."""

_INDEX: Final = struct.Struct("=14xHI12x8s56xI28xI4x")
"""Size of a page, frames, salt of the log, frames that were moved, and frames that SQLite has begun to move."""

_LOG_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24
_SALT_AT: Final = 16
_CHUNK_BYTES: Final = 1 << 20


class LogLostError(Exception):
    """The log or its index is not what SQLite uses; the text states which of them, and how it was lost."""


class _Identity(NamedTuple):
    device: int
    inode: int


class Moves(NamedTuple):
    """How far SQLite has moved its log into the file: changes before and after each checkpoint."""

    salt: bytes
    moved_frames: int
    begun_frames: int

    @property
    def is_moving(self) -> bool:
        """Whether a checkpoint runs, or stopped half-way."""
        return self.moved_frames != self.begun_frames


class SqliteLog:
    """The log and the index that SQLite has opened beside the file at ``path``; ``close`` must follow."""

    def __init__(self, path: Path) -> None:
        self._log_path, self._index_path = beside(path, "-wal"), beside(path, "-shm")
        self._log_identity, log = _opened(self._log_path)
        self._index_identity, self._index = _opened(self._index_path)
        self._log = None if log is None else os.dup(log)

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
        self._log = self._index = None

    def disconnected(self) -> None:
        """Note that SQLite is going to close the index."""
        self._index = None

    def check(self) -> None:
        """Raise ``LogLostError`` unless SQLite's files are the ones under their names, and the log has all frames."""
        for path, identity in ((self._log_path, self._log_identity), (self._index_path, self._index_identity)):
            if _identity(path) != identity:
                raise LogLostError(f"{path.name} was removed, moved or replaced")
        if not self.is_whole:
            raise LogLostError(f"{self._log_path.name} was truncated or overwritten")

    @property
    def is_whole(self) -> bool:
        """Whether the log has the frames that its index promises; True also where neither can be read."""
        for _ in range(_ATTEMPTS):
            before = self._read_index()
            if before is None or self._log is None:
                return True
            bytes_ = os.fstat(self._log).st_size
            salt = os.pread(self._log, 8, _SALT_AT)
            if before == self._read_index() and before[:_HEADER_BYTES] == before[_HEADER_BYTES : 2 * _HEADER_BYTES]:
                page, frames, of_index, *_ = _INDEX.unpack(before)
                frame_bytes = _FRAME_HEADER_BYTES + (1 << 16 if page == 1 else page)
                return not frames or (bytes_ >= _LOG_HEADER_BYTES + frames * frame_bytes and salt == of_index)
        return True  # others write all the time: the next call compares again

    @property
    def is_replaceable(self) -> bool:
        """Whether no other log is under the name of this one."""
        return _identity(self._log_path) in {None, self._log_identity}

    def moves(self) -> Moves | None:
        """Return how far the log was moved; None where the index can't be read."""
        index = self._read_index()
        return None if index is None else Moves(*_INDEX.unpack(index)[2:])

    def set_aside(self) -> None:
        """Rename the log if it is still there, as its file was replaced: SQLite would read the log into the new file.
        The renamed log keeps its changes.
        """
        if _identity(self._log_path) == self._log_identity:
            stamp = time_ns()
            for each in (self._log_path, self._index_path):
                with suppress(FileNotFoundError):  # another process of this folder does the same
                    each.rename(_aside(each, stamp))

    def keep(self) -> Path | None:
        """Copy the log, after it has lost its name; return the copy, None where it has its name or can't be read."""
        if self._log is None or _identity(self._log_path) == self._log_identity:
            return None
        kept = _aside(self._log_path, time_ns())
        with os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as to:
            while chunk := os.pread(self._log, _CHUNK_BYTES, to.tell()):
                to.write(chunk)
            to.flush()
            os.fsync(to.fileno())
        return kept

    def _read_index(self) -> bytes | None:
        index = b"" if self._index is None else os.pread(self._index, _INDEX.size, 0)
        return index if len(index) == _INDEX.size else None


def beside(path: Path, suffix: str) -> Path:
    """Return one of SQLite's files of the store at ``path``."""
    return path.with_name(path.name + suffix)


def _aside(path: Path, stamp: int) -> Path:
    return path.with_name(f"{path.name}.replaced-{stamp}")


def _identity(path: Path) -> _Identity | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return _Identity(found.st_dev, found.st_ino)


def _opened(path: Path) -> tuple[_Identity, int | None]:
    """Return the identity and an open descriptor of a file that SQLite has opened, None where the system doesn't list
    descriptors; raises ``LogLostError``.
    """
    identity = _identity(path)
    try:
        numbers = [int(each.name) for each in Path("/dev/fd").iterdir()]
    except FileNotFoundError:
        numbers = None
    if identity is not None and numbers is None:
        return identity, None
    for number in numbers or ():
        with suppress(OSError):  # closed meanwhile, as the one of the listing
            found = os.fstat(number)
            if (found.st_dev, found.st_ino) == identity:
                return _Identity(found.st_dev, found.st_ino), number
    raise LogLostError(f"{path.name} was removed, moved or replaced")
