"""Notices when the file of a SQLite store is no longer the one that was opened.

Where another file is at its path, what is written would go into a file that nobody finds any more, and SQLite would mix
up the logs of both. A file that is overwritten in place (``cp``) keeps its inode, so its content is looked at as well:
whenever it has changed, it must go on from what it was. SQLite changes the file only when it moves its log there.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from time import sleep
from typing import Final, NamedTuple

_ATTEMPTS: Final = 20
_PAUSE_S: Final = 0.05
"""While SQLite moves its log into the file, its content may be half old and half new."""


class FileReplacedError(Exception):
    """Another file, another content, or none is where the store was."""


class _State(NamedTuple):
    """What changes with the content, without reading it."""

    size_bytes: int
    modified_ns: int


class _Content(NamedTuple):
    """How far the store had come when its log was moved into the file: nothing in a new one."""

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
        self._refused: _State | None = None
        self._content = _Content()

    def check(self) -> None:
        """Raise ``FileReplacedError`` unless it is still the file that was opened."""
        state = self._state_now()
        if state == self._state:
            return
        if state != self._refused:
            for _ in range(_ATTEMPTS):
                if (content := self._goes_on()) is not None:
                    self._state, self._content = state, content
                    return
                sleep(_PAUSE_S)
                state = self._state_now()
            self._refused = state
        raise self._error("overwritten")

    def _state_now(self) -> _State:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            raise self._error("replaced or removed") from None
        if (found.st_dev, found.st_ino) != self._identity:
            raise self._error("replaced or removed")
        return _State(found.st_size, found.st_mtime_ns)

    def _goes_on(self) -> _Content | None:
        """Return what is in the file, without its log, where that is what was there before or goes on from it."""
        try:
            with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as file:
                content = _content(file)
                return content if self._content in {_Content(), content} or _follows(file, self._content) else None
        except sqlite3.Error:
            return None if self._state else self._content  # at the start SQLite says better what is wrong

    def _error(self, how: str) -> FileReplacedError:
        return FileReplacedError(
            f"{self.path} was {how} while it was in use: stop all gateways of this folder, put the right file there "
            f"without {self.path.name}-wal and {self.path.name}-shm, and start them"
        )


def _content(file: sqlite3.Connection) -> _Content:
    if not file.execute("SELECT 1 FROM sqlite_master WHERE name = 'kvgate_audit'").fetchall():
        return _Content()
    [[revision]] = file.execute("SELECT revision FROM kvgate_revision")
    newest = file.execute("SELECT number, at_s FROM kvgate_audit ORDER BY number DESC LIMIT 1").fetchall()
    return _Content(revision, *newest[0]) if newest else _Content(revision)


def _follows(file: sqlite3.Connection, before: _Content) -> bool:
    """Whether a file has what was there before: the last entry of the audit log at least, unless that is too old."""
    [[revision]] = file.execute("SELECT revision FROM kvgate_revision")
    [[oldest, at_s]] = file.execute(
        "SELECT (SELECT MIN(number) FROM kvgate_audit), (SELECT at_s FROM kvgate_audit WHERE number = ?)",
        [before.entry],
    )
    return bool(revision >= before.revision and (at_s == before.entry_at_s or (oldest or 0) > before.entry))


__all__ = ["FileReplacedError", "SqliteFile"]
