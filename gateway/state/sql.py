"""The store over a SQL database.

Both drivers block, on one thread of their own: operators write the store, never a client's request, so one connection
is enough, and one code path is tested with both. A ``Database`` has the differences.
"""

from collections.abc import Callable, Collection, Sequence

from gateway.state import statements
from gateway.state.database import Database
from gateway.state.database_thread import DatabaseThread
from gateway.state.documents import (
    Action,
    AuditBound,
    AuditEntry,
    Change,
    Document,
    Kind,
    Pending,
    Reading,
    Remembered,
    Revision,
)
from gateway.state.statements import Record
from gateway.state.store import Remember
from kvcontrol.core.policy_control import Fence

CALL_LIMIT_S = 5.0


class SqlStore:
    """``Store`` over a ``Database``; the arguments are those of ``DatabaseThread``."""

    def __init__(
        self,
        connect: Callable[[], Database],
        *,
        unavailable: tuple[type[Exception], ...],
        audit: AuditBound | None = None,
        limit_s: float = CALL_LIMIT_S,
    ) -> None:
        self._bound = audit or AuditBound()
        self._thread = DatabaseThread(connect, unavailable=unavailable, limit_s=limit_s)

    async def documents(self, kind: Kind) -> Sequence[Document]:
        return await self._thread.run(lambda database: statements.documents(database, kind))

    async def read(
        self, kinds: Sequence[Kind], clock: Callable[[], float], *, known: Revision | None = None
    ) -> Reading:
        return await self._thread.run(lambda database: statements.read(database, kinds, clock, known))

    async def document(self, kind: Kind, name: str) -> Document | None:
        return await self._thread.run(lambda database: statements.document(database, kind, name))

    async def begin(self, action: Action, *, lease_s: float, excludes: Collection[str] = ()) -> int:
        record = Record(action, self._bound)
        return await self._thread.run(lambda database: statements.begin(database, record, lease_s, excludes))

    async def abandon(self, number: int, action: Action) -> None:
        await self._thread.run(lambda database: statements.abandon(database, number, action))

    async def note(self, number: int, note: str, *, lease_s: float, above: int = 0) -> Fence:
        return await self._thread.run(lambda database: statements.note(database, number, note, lease_s, above))

    async def advance(self, above: int) -> None:
        await self._thread.run(lambda database: statements.advance(database, above))

    async def hold(self, numbers: Sequence[int], *, lease_s: float) -> None:
        await self._thread.run(lambda database: statements.hold(database, numbers, lease_s))

    async def pending(self) -> Pending:
        return await self._thread.run(statements.pending)

    async def take(self, number: int, *, lease_s: float) -> Fence | None:
        return await self._thread.run(lambda database: statements.take(database, number, lease_s))

    async def apply(
        self,
        changes: Sequence[Change],
        *,
        action: Action,
        remember: Remember | None = None,
        completes: int | None = None,
    ) -> Sequence[Document | None]:
        record = Record(action, self._bound, completes)
        return await self._thread.run(lambda database: statements.apply(database, changes, record, remember))

    async def remembered(self, key: str) -> Remembered | None:
        return await self._thread.run(lambda database: statements.remembered(database, key))

    async def audit(self, *, limit: int, before: int | None = None) -> Sequence[AuditEntry]:
        return await self._thread.run(lambda database: statements.audit(database, limit, before, self._bound))

    async def close(self) -> None:
        await self._thread.close()
