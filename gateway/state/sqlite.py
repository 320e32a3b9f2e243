"""SQLite, the store of one host: a file in the state folder, shared by all workers there.

WAL with full syncs: a reader never waits for a writer, and what was answered as done is on the disk.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from gateway.errors import StateError
from gateway.state.documents import AuditBound
from gateway.state.schema import Row, SchemaError, prepare
from gateway.state.sql import SqlStore

FILE_NAME = "kvgate.sqlite3"
_BUSY_S = 10.0
_OLDEST = (3, 35, 0)


class SqliteDatabase:
    """One connection; a writer waits up to ten seconds for another process's."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        try:
            self.execute("PRAGMA journal_mode = WAL")
            self.execute("PRAGMA synchronous = FULL")
        except BaseException:
            self._connection.close()
            raise

    @property
    def serial(self) -> str:
        return "INTEGER PRIMARY KEY AUTOINCREMENT"

    def tables(self) -> frozenset[str]:
        return frozenset(name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'"))

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

    def close(self) -> None:
        self._connection.close()


def open_sqlite(folder: Path, audit: AuditBound | None = None) -> SqlStore:
    """Return the store in ``folder``, made when it isn't there; raises ``StateError`` when it can't be used."""
    path = folder / FILE_NAME
    if sqlite3.sqlite_version_info < _OLDEST:
        raise StateError(f"SQLite {sqlite3.sqlite_version} is too old; 3.35 or newer is needed")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        with closing(SqliteDatabase(path)) as database:
            prepare(database)
    except (OSError, sqlite3.Error, SchemaError) as error:
        raise StateError(f"{path}: can't be used as the store: {error}") from error
    return SqlStore(lambda: SqliteDatabase(path), unavailable=(sqlite3.DatabaseError,), audit=audit)


__all__ = ["FILE_NAME", "SqliteDatabase", "open_sqlite"]
