"""What lies under a path: how much room, which file system, and whether it takes direct I/O."""

import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

_PAGE_BYTES = 4096
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The file system under a path. ``kind`` is the kernel's name (``ext4``), empty where it can't be told."""

    mounted_on: Path
    kind: str
    total_bytes: int
    free_bytes: int

    @property
    def is_memory(self) -> bool:
        """Whether its files are main memory."""
        return self.kind in _MEMORY_FILE_SYSTEMS


def nearest_existing(path: Path) -> Path:
    """Return the path itself or the nearest folder above it that is there."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def file_system_of(path: Path) -> FileSystem:
    """Return what a path that need not exist would lie on."""
    existing = nearest_existing(path).resolve()
    usage = shutil.disk_usage(existing)
    mounts = [(Path(each.mountpoint), each.fstype) for each in psutil.disk_partitions(all=True)]
    under = [(len(mount.parts), index) for index, (mount, _) in enumerate(mounts) if existing.is_relative_to(mount)]
    mount, kind = mounts[max(under)[1]] if under else (Path(existing.anchor), "")  # of equal ones the last hides others
    return FileSystem(mounted_on=mount, kind=kind, total_bytes=usage.total, free_bytes=usage.free)


def held_bytes(path: Path) -> int:
    """Return how much room a file takes now; 0 when it isn't there."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def direct_io_problem(folder: Path) -> str | None:
    """Write and read one page past the page cache in a folder that exists; return why that fails, None when it works.

    Leaves no file behind.
    """
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        return "this system has no O_DIRECT"
    try:
        with (
            tempfile.NamedTemporaryFile(dir=folder, prefix=".kvgate-probe-") as probe,
            mmap.mmap(-1, _PAGE_BYTES) as page,
        ):
            page[:] = os.urandom(_PAGE_BYTES)
            written = bytes(page)
            handle = os.open(probe.name, os.O_RDWR | direct)
            try:
                if os.pwritev(handle, [page], 0) != _PAGE_BYTES or os.preadv(handle, [page], 0) != _PAGE_BYTES:
                    return "a page was written or read only in part"
            finally:
                os.close(handle)
            return None if bytes(page) == written else "a page was read back with different bytes"
    except OSError as error:
        return error.strerror or str(error)
