"""Scarce resources of this process: file descriptors, and space on the store's disk.

Each becomes a problem, with what to do about it, before requests fail for it; the log has it once.
"""

import asyncio
import errno
import os
import resource
from pathlib import Path
from typing import Final

from gateway.problems import ProblemKind, Problems

_EVERY_S: Final = 2.0
_FULL_SHARE: Final = 0.9
_LEAST_FREE_BYTES: Final = 16 << 20


class Resources:
    """Looks every two seconds. ``folder`` is where the store is, None where it is elsewhere."""

    def __init__(self, problems: Problems, *, folder: Path | None) -> None:
        self._problems = problems
        self._folder = folder

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_EVERY_S)

    def look(self) -> None:
        """Report what is short now, and clear what is not."""
        self._look_at_files()
        if self._folder is not None:
            self._look_at_disk(self._folder)

    def _look_at_files(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if not _files_run_out(limit):
            self._problems.clear(ProblemKind.FILES, "file descriptors")
            return
        self._problems.report(
            ProblemKind.FILES,
            "file descriptors",
            f"nearly all of the {limit} file descriptors of this process are in use, and a request takes two: new "
            "connections will be refused. Raise the limit (ulimit -n, LimitNOFILE= of systemd), start more workers, or "
            "look for clients that leave connections open",
        )

    def _look_at_disk(self, folder: Path) -> None:
        found = os.statvfs(folder)
        if found.f_bavail * found.f_frsize >= _LEAST_FREE_BYTES:
            self._problems.clear(ProblemKind.DISK, str(folder))
            return
        self._problems.report(
            ProblemKind.DISK,
            str(folder),
            f"less than {_LEAST_FREE_BYTES >> 20} MiB are free on the disk of the store: changes of tenants, keys and "
            "quotas will be refused. Free some space, or move the store (state_dir, store_url)",
        )


def _files_run_out(limit: int) -> bool:
    """Whether the next descriptor is near the limit: the system gives the lowest free one. O(1), as a list is not."""
    if limit == resource.RLIM_INFINITY:
        return False
    try:
        lowest = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            return True
        raise
    os.close(lowest)
    return lowest >= limit * _FULL_SHARE
