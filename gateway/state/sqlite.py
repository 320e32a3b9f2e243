"""SQLite, the store of one host: a file in the state folder, shared by all workers there.

WAL with full syncs: a reader never waits for a writer, and a change is on the disk when it is answered.

The file must stay the one that was opened (``sqlite_file.py``): the store can't be used otherwise until a restart.
"""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from time import time

from gateway.errors import StateError
from gateway.state.database import Row
from gateway.state.documents import NOT_TEXT, AuditBound
from gateway.state.schema import SchemaError, prepare
from gateway.state.sql import CALL_LIMIT_S, SqlStore
from gateway.state.sqlite_file import FileReplacedError, LogReplacedError, SqliteFile
from gateway.state.sqlite_log import SqliteLog

FILE_NAME = "kvgate.sqlite3"
_log = logging.getLogger(__name__)
_OLDEST = (3, 35, 0)
_ROOM_BYTES = 1 << 20
"""With less, SQLite may have no room for its log or for the index of the log."""


class DiskFullError(Exception):
    """SQLite can't open the store, and its disk is full."""


class SqliteDatabase:
    """One connection to a file; a writer waits up to ``busy_s`` for another process's.

    The last connection that is closed moves the log into the file, unless it is read-only. So a read-only connection,
    which holds SQLite's shared lock, is closed last where the file was replaced.
    """

    def __init__(self, file: SqliteFile, *, busy_s: float = CALL_LIMIT_S, clock: Callable[[], float] = time) -> None:
        self._file = file
        self._clock = clock
        uri = file.path.absolute().as_uri()
        with _full_disk_named(file.path.parent), ExitStack() as opened:
            self.check()
            self._connection = opened.enter_context(
                closing(sqlite3.connect(f"{uri}?mode=rw", uri=True, timeout=busy_s, isolation_level=None))
            )
            self._reader = opened.enter_context(
                closing(sqlite3.connect(f"{uri}?mode=ro", uri=True, isolation_level=None))
            )
            self.check()
            self.execute("PRAGMA journal_mode = WAL")
            self.execute("PRAGMA synchronous = FULL")
            self._connection.text_factory = _text
            self._connection.create_function("kvgate_clock", 0, clock)
            self.tables()  # opens the log
            opened.callback(self._forget_log)
            file.connected(self._connection)
            self._reader.execute("SELECT 1 FROM sqlite_master").fetchall()
            self.check()
            opened.pop_all()

    @property
    def serial(self) -> str:
        return "INTEGER PRIMARY KEY AUTOINCREMENT"

    @property
    def lost(self) -> bool:
        return False

    def tables(self) -> frozenset[str]:
        return frozenset(name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'"))

    @property
    def clock(self) -> str:
        return "kvgate_clock()"

    def check(self) -> None:
        self._file.check()

    @contextmanager
    def transaction(self) -> Iterator[float]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._clock()
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> Sequence[Row]:
        found = self._connection.execute(statement, parameters).fetchall()
        return [[_not_text(each) if isinstance(each, bytes) else each for each in row] for row in found]

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> None:
        self._connection.execute(statement, parameters)

    def abort(self) -> None:
        self._connection.interrupt()

    def close(self) -> None:
        """Move the log into the file where that is the store, and close the connection. A log that is not moved and has
        no name any more is copied.
        """
        connections = [self._reader, self._connection]
        is_replaced = is_lost = is_moved = False
        try:
            self._file.check()
            self._file.remember(self._connection)
        except LogReplacedError as error:
            _log.warning("the store is closed: %s", error)
            is_lost = True
            is_moved = self._is_movable()
        except FileReplacedError as error:
            _log.warning("the log of the store is not moved into another file: %s", error)
            is_replaced = True
        except (sqlite3.Error, OSError) as error:
            _log.warning("%s: it is unknown whether this is the store; its log stays: %s", self._file.path, error)
            connections.reverse()
        if is_replaced or (is_lost and not is_moved):
            connections.reverse()
        log = self._file.disconnected()
        for each in connections:
            each.close()
        if log is not None:
            with closing(log):
                if is_replaced:
                    log.set_aside()
                if is_lost:
                    self._keep(log, is_moved=is_moved)

    def _forget_log(self) -> None:
        if (log := self._file.disconnected()) is not None:
            log.close()

    def _is_movable(self) -> bool:
        """Return whether SQLite may move a lost log into the file, and remember what the file must then contain."""
        try:
            if not self._file.is_movable:
                return False
            self._file.remember(self._connection)
        except (sqlite3.Error, OSError, FileReplacedError) as error:
            _log.warning("%s: the lost log is not moved into the file: %s", self._file.path, error)
            return False
        return True

    def _keep(self, log: SqliteLog, *, is_moved: bool) -> None:
        """Copy a lost log, unless the file has its changes."""
        try:
            if is_moved and self._file.is_complete:
                _log.warning("%s: the file has all changes of the lost log", self._file.path)
            elif (kept := log.keep()) is not None:
                _log.warning("%s: the lost log is kept as %s", self._file.path, kept)
        except (sqlite3.Error, OSError) as error:
            _log.error("%s: the lost log can't be kept: %s", self._file.path, error)


def _text(raw: bytes) -> str:
    """Decode a text; one that is not UTF-8 fails alone where it is used, and not the whole answer of SQLite."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _not_text(raw)


def _not_text(raw: bytes) -> str:
    return NOT_TEXT + raw.decode(errors="backslashreplace")


@contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """Name the disk where an error of SQLite (often only "disk I/O error") comes from a full one."""
    try:
        yield
    except sqlite3.OperationalError as error:
        disk = os.statvfs(folder)
        if (free_bytes := disk.f_bavail * disk.f_frsize) >= _ROOM_BYTES:
            raise
        raise DiskFullError(
            f"the disk of {folder} is full ({free_bytes} bytes are free): free at least {_ROOM_BYTES >> 20} MiB there "
            f"({error})"
        ) from error


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
        file = SqliteFile(path)
        with _full_disk_named(folder), closing(SqliteDatabase(file)) as database:
            prepare(database)
    except (OSError, sqlite3.Error, SchemaError, FileReplacedError, DiskFullError) as error:
        raise StateError(f"{path}: can't be used as the store: {error}") from error
    return SqlStore(
        lambda: SqliteDatabase(file, busy_s=limit_s / 2, clock=clock),  # the next call waits for it, and its time runs
        unavailable=(sqlite3.DatabaseError, FileReplacedError, DiskFullError, OSError),
        audit=audit,
        limit_s=limit_s,
    )
