"""SQLite, the store of one host: a file in the state folder, shared by all workers there.

WAL with full syncs: a reader never waits for a writer, and what was answered as done is on the disk.

The file must stay the one that was opened. Where another one is at its path, what is written would go into a file that
nobody finds any more, and SQLite would mix up the logs of both: the store can't be used then until a restart.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import time
from typing import NamedTuple

from gateway.errors import StateError
from gateway.state.database import Row
from gateway.state.documents import AuditBound
from gateway.state.schema import SchemaError, prepare
from gateway.state.sql import CALL_LIMIT_S, SqlStore

FILE_NAME = "kvgate.sqlite3"
_OLDEST = (3, 35, 0)


class FileReplacedError(Exception):
    """Another file, or none, is where the store was."""


class _Identity(NamedTuple):
    device: int
    inode: int


class SqliteDatabase:
    """One connection to the file with this identity; a writer waits up to ``busy_s`` for another process's."""

    def __init__(
        self, path: Path, identity: _Identity, *, busy_s: float = CALL_LIMIT_S, clock: Callable[[], float] = time
    ) -> None:
        self._path = path
        self._clock = clock
        self._identity = identity
        self.check()
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=busy_s, isolation_level=None
        )
        try:
            self.check()
            self.execute("PRAGMA journal_mode = WAL")
            self.execute("PRAGMA synchronous = FULL")
        except BaseException:
            self._connection.close()
            raise

    @property
    def serial(self) -> str:
        return "INTEGER PRIMARY KEY AUTOINCREMENT"

    @property
    def lost(self) -> bool:
        return False

    def tables(self) -> frozenset[str]:
        return frozenset(name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'"))

    def now(self) -> float:
        return self._clock()

    def check(self) -> None:
        if identity_of(self._path) != self._identity:
            raise FileReplacedError(
                f"{self._path} was replaced or removed while it was in use: stop all gateways of this folder, put the "
                f"right file there without {self._path.name}-wal and {self._path.name}-shm, and start them"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> Sequence[Row]:
        return self._connection.execute(statement, parameters).fetchall()

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> None:
        self._connection.execute(statement, parameters)

    def abort(self) -> None:
        self._connection.interrupt()

    def close(self) -> None:
        self._connection.close()


def identity_of(path: Path) -> _Identity | None:
    """Return which file is at a path, None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return _Identity(found.st_dev, found.st_ino)


def open_sqlite(
    folder: Path,
    audit: AuditBound | None = None,
    *,
    limit_s: float = CALL_LIMIT_S,
    clock: Callable[[], float] = time,
) -> SqlStore:
    """Return the store in ``folder``, made when it isn't there; raises ``StateError`` when it can't be used."""
    path = folder / FILE_NAME
    if sqlite3.sqlite_version_info < _OLDEST:
        raise StateError(f"SQLite {sqlite3.sqlite_version} is too old; 3.35 or newer is needed")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        found = path.stat()
        identity = _Identity(found.st_dev, found.st_ino)
        with closing(SqliteDatabase(path, identity)) as database:
            prepare(database)
    except (OSError, sqlite3.Error, SchemaError, FileReplacedError) as error:
        raise StateError(f"{path}: can't be used as the store: {error}") from error
    return SqlStore(
        lambda: SqliteDatabase(
            path, identity, busy_s=limit_s / 2, clock=clock
        ),  # the next call waits for it, and its time runs
        unavailable=(sqlite3.DatabaseError, FileReplacedError, OSError),
        audit=audit,
        limit_s=limit_s,
    )


__all__ = ["FILE_NAME", "FileReplacedError", "SqliteDatabase", "open_sqlite"]
