"""Notices when the file of a SQLite store is no longer the one that was opened.

Where another file is at its path, changes would go into a file without a name, and SQLite would mix up the logs of
both. A file that is overwritten in place (``cp``) keeps its inode. So each change of the file must have two properties:

- SQLite made it. SQLite changes the file only when it moves its log there (a checkpoint), and the index of the log
  (``-shm``, https://www.sqlite.org/walformat.html) records each checkpoint before it begins and after it ends.
- It continues the content: the store, read with its log, has the newest entry of the last comparison, or newer ones.

A full disk or a kill may stop a checkpoint half-way: then the file alone is of no use, but nothing is lost, and SQLite
moves the same pages again later. A copy that equals the file byte by byte is not noticed.

The log must stay, too (``sqlite_log.py``): a store that has lost it is not used again before a restart.

Only SQLite may open the file in this process: closing another descriptor of it would drop all of SQLite's locks (a
property of POSIX locks).
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from time import sleep
from typing import Final, NamedTuple

from gateway.state.sqlite_log import LogLostError, Moves, SqliteLog

_ATTEMPTS: Final = 20
_PAUSE_S: Final = 0.05
"""While SQLite moves a page of its log into the file, that page may be half old and half new."""

_BUSY_S: Final = 1.0
_NOT_A_STORE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""Errors of SQLite for content that is no database; a full disk or a busy file has another error."""

_HALF_MOVED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR})
"""Errors that SQLite may raise for a file without its log after half a checkpoint."""


class FileReplacedError(Exception):
    """Another file, another content, or none is where the store was."""


class LogReplacedError(FileReplacedError):
    """The file is the same, but its log or the index of the log is not."""


class _State(NamedTuple):
    """Properties that change with the content, read without it."""

    size_bytes: int
    modified_ns: int


class _Moved(NamedTuple):
    """The file without its log. ``schema`` counts changes of the schema: a backup has another number."""

    schema: int
    pages: int
    revision: int


class _Content(NamedTuple):
    """How far the store had come, read with its log: nothing in a new one."""

    revision: int = -1
    entry: int = 0
    entry_at_s: float = 0.0


class SqliteFile:
    """The file at ``path``, which must exist; used from one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = path.stat()
        self._identity = (found.st_dev, found.st_ino)
        self._state: _State | None = None
        self._moves: Moves | None = None
        self._overwritten = False
        self._lost: str | None = None
        """How the log was lost."""
        self._content = _Content()
        self._moved = _Moved(-1, -1, -1)
        self._log: SqliteLog | None = None
        """The log of the connection."""

    def check(self) -> None:
        """Raise ``FileReplacedError`` unless it is still the file that was opened, with its log, SQLite's error where
        that can't be known.
        """
        for _ in range(_ATTEMPTS):
            moves = self._moves_now()  # before the state: then a checkpoint between both is seen at the next call
            state = self._state_now()
            self._check_log()
            if self._overwritten:
                break
            if state == self._state or self._continues(state):
                self._state, self._moves = state, moves
                return
            sleep(_PAUSE_S)
        self._overwritten = True  # for good, whatever the content is later
        raise self._error("overwritten")

    def connected(self, connection: sqlite3.Connection) -> None:
        """Note that a connection has opened the log, before another one does; ``disconnected`` must precede its end.
        Raises ``FileReplacedError`` where it lacks content that an earlier connection had.
        """
        try:
            self._log = SqliteLog(self.path)
        except LogLostError as error:
            self._lost = str(error)
        if self._lost is None and not _follows(connection, self._content):
            self._lost = f"{self.path.name}-wal was removed, moved or replaced"
        if self._lost is not None:
            raise self._log_error()

    def remember(self, connection: sqlite3.Connection) -> None:
        """Note what the connection contains: the next one must continue it."""
        self._content = _content(connection)

    def disconnected(self) -> SqliteLog | None:
        """Note that the connection is going to be closed; return its log, which must be closed, too."""
        log, self._log = self._log, None
        if log is not None:
            log.disconnected()
        return log

    @property
    def is_movable(self) -> bool:
        """Whether a log that was lost is whole, and nobody has changed the file or begun another log: then SQLite may
        move it into the file when the last connection is closed.
        """
        is_same = not self._overwritten and self._state_now() == self._state
        return is_same and self._log is not None and self._log.is_replaceable and self._log.is_whole

    @property
    def is_complete(self) -> bool:
        """Whether the file without a log has the content of the last connection."""
        with closing(self._opened("immutable=1")) as store:
            return _content(store) == self._content

    def _state_now(self) -> _State:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            raise self._error("replaced or removed") from None
        if (found.st_dev, found.st_ino) != self._identity:
            raise self._error("replaced or removed")
        return _State(found.st_size, found.st_mtime_ns)

    def _moves_now(self) -> Moves | None:
        """Return how far the log was moved; None without a connection."""
        return None if self._log is None else self._log.moves()

    def _check_log(self) -> None:
        if self._lost is None and self._log is not None:
            try:
                self._log.check()
            except LogLostError as error:
                self._lost = str(error)  # for good: a new connection would begin another log
        if self._lost is not None:
            raise self._log_error()

    def _continues(self, state: _State) -> bool:
        """Return whether SQLite changed the file, and the store continues the remembered content; if so, remember the
        new content.
        """
        if not state.size_bytes:
            return not (self._state and self._state.size_bytes)
        try:
            moved = self._read_without_log()
            if moved is None or moved.revision < self._moved.revision:
                return False
            if moved != self._moved and self._is_foreign():
                return False
            with closing(self._opened("mode=ro")) as store:
                store.execute("BEGIN")
                content = _content(store)
                if not _follows(store, self._content):
                    return False
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF not in _NOT_A_STORE:
                raise
            return self._state is None  # at the start SQLite has a better message
        self._content, self._moved = content, moved
        return True

    def _is_foreign(self) -> bool:
        """Return whether no checkpoint explains a change since the last comparison."""
        moves = self._moves_now()
        return moves is not None and moves == self._moves and not moves.is_moving

    def _read_without_log(self) -> _Moved | None:
        """Return what the file contains; None where its audit log is another one.

        Half a checkpoint leaves pages of two times, so only two facts count: the revision, whose page is always the
        same one, never decreases; and an entry of the audit log keeps its time.
        """
        try:
            with closing(self._opened("immutable=1")) as store:
                store.execute("PRAGMA writable_schema = ON")  # the file may be shorter than its header promises
                [[schema]] = store.execute("PRAGMA schema_version").fetchall()
                [[pages]] = store.execute("PRAGMA page_count").fetchall()
                revision = _revision(store)
                at_s = _entry_at_s(store, self._content.entry) if revision >= 0 else None
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF not in _HALF_MOVED:
                raise
            return self._moved
        is_another = isinstance(at_s, float) and at_s != self._content.entry_at_s
        return None if is_another else _Moved(schema, pages, revision)

    def _opened(self, mode: str) -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?{mode}"
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)

    def _error(self, how: str) -> FileReplacedError:
        name = self.path.name
        return FileReplacedError(
            f"{self.path} was {how} while it was in use: stop all gateways of this folder, move all files {name}* "
            f"together to another folder and keep them, copy the backup to {name}, and start the gateways"
        )

    def _log_error(self) -> LogReplacedError:
        return LogReplacedError(
            f"{self.path} lost its log while it was in use ({self._lost}): stop all gateways of this folder, see "
            '"A lost log of SQLite" in docs/operations.md for the changes of the log, and start the gateways'
        )


def _revision(store: sqlite3.Connection) -> int:
    """Return the revision, -1 where there is none or it is no number."""
    if not store.execute("SELECT 1 FROM sqlite_master WHERE name = 'kvgate_revision'").fetchall():
        return -1
    found = store.execute("SELECT revision FROM kvgate_revision").fetchall()
    return found[0][0] if found and isinstance(found[0][0], int) else -1


def _entry_at_s(store: sqlite3.Connection, number: int) -> object:
    found = store.execute("SELECT at_s FROM kvgate_audit WHERE number = ?", [number]).fetchall()
    return found[0][0] if found else None


def _content(store: sqlite3.Connection) -> _Content:
    revision = _revision(store)
    if revision < 0:
        return _Content()
    newest = store.execute("SELECT number, at_s FROM kvgate_audit ORDER BY number DESC LIMIT 1").fetchall()
    return _Content(revision, *newest[0]) if newest else _Content(revision)


def _follows(store: sqlite3.Connection, before: _Content) -> bool:
    """Whether a store continues ``before``: it has its last audit entry, or that entry is too old to keep."""
    if before in {_Content(), _content(store)}:
        return True
    [[oldest]] = store.execute("SELECT MIN(number) FROM kvgate_audit").fetchall()
    known = _entry_at_s(store, before.entry) == before.entry_at_s or (oldest or 0) > before.entry
    return _revision(store) >= before.revision and known
