"""One connection to a database of any kind."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

Row = Sequence[Any]


class CommitUnknownError(Exception):
    """The connection was lost during a commit: whether the database made it is unknown."""


class Database(Protocol):
    """Used from one thread, but for ``abort``. Parameters are written ``?``."""

    @property
    def serial(self) -> str:
        """The type of a column that numbers its rows."""
        ...

    @property
    def lost(self) -> bool:
        """Whether the other side has ended the connection: the same call may succeed on a new one."""
        ...

    def tables(self) -> frozenset[str]:
        """Return the names of the tables."""
        ...

    @property
    def clock(self) -> str:
        """The SQL expression of the time of the database's clock in seconds since 1970."""
        ...

    def check(self) -> None:
        """Raise when the connection no longer leads to the store."""
        ...

    def transaction(self) -> AbstractContextManager[float]:
        """Run the block as one transaction, with no other writer at the same time; roll it back when the block raises.
        Yield the time of its start by the database's clock.

        Raises ``CommitUnknownError`` where it is unknown whether the database has committed it.
        """
        ...

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> Sequence[Row]: ...

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> None: ...

    def abort(self) -> None:
        """Make the statement that runs on the other thread fail now; the connection can't be used afterwards."""
        ...

    def close(self) -> None: ...
