"""Locks of SQLite on the store's files: other processes rely on them."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.state import Action, Kind, Put, open_sqlite
from gateway.state.sqlite import FILE_NAME
from tests.support.stored_revision import revision_of

OPERATION = Action(actor="admin", action="put", target="tenant/acme")
OF_THE_INDEX = (128, 1)
"""SQLite: without this lock the next process to connect empties the index."""
OF_THE_FILE = (0x4000_0002, 510)
"""SQLite: without this lock another process takes its connection for the last one."""
LOOK = """
import fcntl, struct, sys
with open(sys.argv[1], "r+b") as file:
    asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, int(sys.argv[2]), int(sys.argv[3]), 0)
    print(struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
"""


def is_locked(path: Path, start: int, length: int) -> bool:
    """Whether another process sees a lock there."""
    command = [sys.executable, "-c", LOOK, str(path), str(start), str(length)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip() == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="the layout of struct flock is that of Linux")
async def test_the_locks_of_a_store_stay_while_it_is_used(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path)
    try:
        for number in range(3):
            await store.apply([Put(kind=Kind.TENANT, name=f"t{number}", body="{}")], action=OPERATION)
            await revision_of(store)
            (tmp_path / FILE_NAME).touch()
            assert is_locked(tmp_path / f"{FILE_NAME}-shm", *OF_THE_INDEX)
            assert is_locked(tmp_path / FILE_NAME, *OF_THE_FILE)
    finally:
        await store.close()
