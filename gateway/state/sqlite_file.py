"""Notices when the file of a SQLite store is no longer the one that was opened.

Where another file is at its path, what is written would go into a file that nobody finds any more, and SQLite would mix
up the logs of both. A file that is overwritten in place (``cp``) keeps its inode. So after each change of the file its
content is compared: the store, read with its log, must have the newest entry of the last comparison, or newer ones.

SQLite changes the file only when it moves its log there. A full disk or a kill may stop it half-way: then the file
alone is of no use, but nothing is lost, and SQLite moves the same pages again later.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from time import sleep
from typing import Final, NamedTuple

_ATTEMPTS: Final = 20
_PAUSE_S: Final = 0.05
"""While SQLite moves a page of its log into the file, that page may be half old and half new."""

_BUSY_S: Final = 1.0
_NO_STORE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""What SQLite answers for content that is no database; a full disk or a busy file is another answer."""

_HALF_MOVED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_ERROR})
"""What SQLite may answer for a file without the log that was moved there half-way."""


class FileReplacedError(Exception):
    """Another file, another content, or none is where the store was."""


class _State(NamedTuple):
    """What changes with the content, without reading it."""

    size_bytes: int
    modified_ns: int


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
        self._overwritten = False
        self._content = _Content()
        self._moved_revision = -1

    def check(self) -> None:
        """Raise ``FileReplacedError`` unless it is still the file that was opened, SQLite's error where that can't be
        known.
        """
        state = self._state_now()
        if not self._overwritten:
            if state == self._state:
                return
            for _ in range(_ATTEMPTS):
                if self._goes_on(state):
                    self._state = state
                    return
                sleep(_PAUSE_S)
                state = self._state_now()
            self._overwritten = True  # for good: SQLite mixes its log into that file when the connection is closed
        raise self._error("overwritten")

    def _state_now(self) -> _State:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            raise self._error("replaced or removed") from None
        if (found.st_dev, found.st_ino) != self._identity:
            raise self._error("replaced or removed")
        return _State(found.st_size, found.st_mtime_ns)

    def _goes_on(self, state: _State) -> bool:
        """Return whether the store equals the remembered content or continues it; if so, remember the new content."""
        if not state.size_bytes:
            return not (self._state and self._state.size_bytes)
        try:
            moved_revision = self._moved()
            if moved_revision is None:
                return False
            with closing(self._opened("mode=ro")) as store:
                store.execute("BEGIN")
                content = _content(store)
                if self._content not in {_Content(), content} and not _follows(store, self._content):
                    return False
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF not in _NO_STORE:
                raise
            return self._state is None  # at the start SQLite says better what is wrong
        self._content, self._moved_revision = content, moved_revision
        return True

    def _moved(self) -> int | None:
        """Return the newest revision that was moved from the log into the file, none where the file contradicts what it
        was.

        A log that was moved half-way leaves pages of two times, so only two facts count: the revision, in one page that
        never moves, never falls, and an entry of the audit log never gets another time.
        """
        try:
            with closing(self._opened("immutable=1")) as file:
                file.execute("PRAGMA writable_schema = ON")  # the file may be shorter than its first page says
                revision = _revision(file)
                if revision < self._moved_revision:
                    return None
                at_s = _entry_at_s(file, self._content.entry) if revision >= 0 else None
                return None if isinstance(at_s, float) and at_s != self._content.entry_at_s else revision
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF not in _HALF_MOVED:
                raise
            return self._moved_revision

    def _opened(self, mode: str) -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?{mode}"
        return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)

    def _error(self, how: str) -> FileReplacedError:
        name = self.path.name
        return FileReplacedError(
            f"{self.path} was {how} while it was in use: stop all gateways of this folder, move {name}, {name}-wal and "
            f"{name}-shm together to another folder and keep them, copy the backup to {name}, and start the gateways"
        )


def _revision(store: sqlite3.Connection) -> int:
    if not store.execute("SELECT 1 FROM sqlite_master WHERE name = 'kvgate_revision'").fetchall():
        return -1
    found = store.execute("SELECT revision FROM kvgate_revision").fetchall()
    return int(found[0][0]) if found else -1


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
    """Whether a store has what was there before: the last entry of the audit log at least, unless that is too old."""
    [[oldest]] = store.execute("SELECT MIN(number) FROM kvgate_audit").fetchall()
    known = _entry_at_s(store, before.entry) == before.entry_at_s or (oldest or 0) > before.entry
    return _revision(store) >= before.revision and known
