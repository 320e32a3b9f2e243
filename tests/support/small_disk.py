"""A filesystem that is soon full: a tmpfs of its own, where the user may mount one."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """Mount one at ``folder``; skips the test where that isn't allowed."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("only root can mount a small disk")
    folder.mkdir()
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a small disk can't be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run([umount, str(folder)], timeout=30, check=True)
