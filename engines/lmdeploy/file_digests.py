"""Digests of whole files, computed once for each state of a file and remembered on disk.

A weights file of 15 GB takes seconds to read and to hash, so its digest is kept under the file's path together with
size, inode, device and both times of change. Whatever writes to a file changes one of them, and the digest is computed
again. A file that is hashed within milliseconds is not worth an entry.

The digest is a tree: BLAKE2b of every chunk, on all cores, and BLAKE2b over the chunks' digests. Processes that start
at the same time on the same file wait for each other, and the second reads what the first has computed.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Final, TextIO

DIGEST_BYTES: Final = 16
CHUNK_BYTES: Final = 32 << 20
REMEMBERED_BYTES: Final = 64 << 20
"""Files below this size are hashed at every start."""
_READ_BYTES: Final = 1 << 20
_MAX_THREADS: Final = 16
_VERSION: Final = 1

_log = logging.getLogger(__name__)


class FileChangedError(OSError):
    """A file was written to while it was read; the message names it."""


class FileDigests:
    """Digests of files; ``folder`` is made where it is missing. Any thread; any number of processes share a folder.

    A folder that can't be used costs time and nothing else: digests are computed at every start, and a log line
    names the folder.
    """

    def __init__(self, folder: Path, *, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._folder = folder
        self._remembered_bytes = remembered_bytes
        self.computed = 0
        """Files that had to be read."""

    def of(self, path: Path) -> bytes:
        """Return the digest of a file's contents. Raises ``OSError``, ``FileChangedError`` for a file being written."""
        path = path.resolve()
        if path.stat().st_size < self._remembered_bytes:
            return self._compute(path)
        with self._entry(path) as entry:
            known = None if entry is None else _known(entry, path)
            if known is None:
                known = self._compute(path)
                if entry is not None:
                    _keep(entry, path, known)
            return known

    def _compute(self, path: Path) -> bytes:
        self.computed += 1
        before = _state(path)
        digest = _tree(path)
        if _state(path) != before:
            raise FileChangedError(f"{path} was written to while its digest was computed; start again when it is whole")
        return digest

    @contextmanager
    def _entry(self, path: Path) -> Iterator[TextIO | None]:
        """Yield the file's entry, locked; None where the folder can't be used."""
        name = blake2b(os.fsencode(path), digest_size=DIGEST_BYTES, person=b"kvgate.path").hexdigest()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            entry = (self._folder / f"{name}.json").open("a+", encoding="utf-8")
        except OSError as error:
            _log.warning(
                "digests can't be kept in %s: %s; that of %s is computed at each start", self._folder, error, path
            )
            yield None
            return
        with entry:
            fcntl.flock(entry, fcntl.LOCK_EX)
            yield entry


def _state(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
        "device": stat.st_dev,
    }


def _known(entry: TextIO, path: Path) -> bytes | None:
    """Return the digest of an entry, None where it is none, or is of another state of the file."""
    entry.seek(0)
    try:
        kept = json.load(entry)
        if kept["version"] == _VERSION and kept["path"] == str(path) and kept["state"] == _state(path):
            digest = bytes.fromhex(kept["digest"])
            return digest if len(digest) == DIGEST_BYTES else None
    except (ValueError, KeyError, TypeError):
        return None  # new, or cut short by a crash
    return None


def _keep(entry: TextIO, path: Path, digest: bytes) -> None:
    try:
        entry.seek(0)
        entry.truncate()
        json.dump({"version": _VERSION, "path": str(path), "state": _state(path), "digest": digest.hex()}, entry)
        entry.flush()
    except OSError as error:
        _log.warning("the digest of %s can't be kept: %s; it is computed at each start", path, error)


def _tree(path: Path) -> bytes:
    size = path.stat().st_size
    tree = blake2b(size.to_bytes(8, "little"), digest_size=DIGEST_BYTES, person=b"kvgate.file")
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        for chunk in pool.map(lambda start: _chunk(path, start), range(0, size, CHUNK_BYTES)):
            tree.update(chunk)
    return tree.digest()


def _chunk(path: Path, start: int) -> bytes:
    digest = blake2b(digest_size=DIGEST_BYTES, person=b"kvgate.chunk")
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = CHUNK_BYTES
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()
