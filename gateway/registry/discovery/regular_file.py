"""Reading of files that others write, beside the event loop: a file may be on a file system that hangs.

Only a regular file is read: opening a FIFO would wait for its writer.
"""

import asyncio
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


class NotRegularError(Exception):
    """There is something else than a regular file."""


async def status_of(path: Path) -> os.stat_result:
    """Return the status of a regular file; raises ``OSError`` or ``NotRegularError``."""
    status = await asyncio.to_thread(path.stat)
    _expect_regular(status)
    return status


async def content_of(path: Path, *, most_bytes: int) -> bytes:
    """Return the first ``most_bytes`` of a regular file; raises ``OSError`` or ``NotRegularError``."""
    return await asyncio.to_thread(_read, path, most_bytes)


def _read(path: Path, most_bytes: int) -> bytes:
    with open(path, "rb", opener=_open_at_once) as file:
        _expect_regular(os.fstat(file.fileno()))
        return file.read(most_bytes)


def _expect_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularError(f"a {_KINDS.get(stat.S_IFMT(status.st_mode), 'special file')}; it must be a regular file")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
