"""The store in SQL, the same statements for SQLite and PostgreSQL.

Both drivers are used blocking, on one thread of their own: the store is read at start and written by people, never by a
client's request, so one connection does, and one code path is tested against both. What differs is in a ``Database``.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import time
from typing import NamedTuple, TypeVar

from gateway.state.documents import ABSENT, Action, AuditBound, AuditEntry, Change, Delete, Document, Kind, Remembered
from gateway.state.schema import Database, Row, SchemaError, prepare
from gateway.state.store import ConflictError, Remember, RepeatedKeyError, StoreUnavailableError

_Result = TypeVar("_Result")

_REMEMBERED_S = 24 * 3600.0
_CALL_LIMIT_S = 30.0


class SqlStore:
    """``Store`` over a ``Database``; ``connect`` is called on the store's thread, again after a failure.
    ``unavailable`` is what the driver raises when the database can't be used.
    """

    def __init__(
        self,
        connect: Callable[[], Database],
        *,
        unavailable: tuple[type[Exception], ...],
        audit: AuditBound | None = None,
        clock: Callable[[], float] = time,
    ) -> None:
        self._connect = connect
        self._unavailable: tuple[type[Exception], ...] = (*unavailable, SchemaError)
        self._bound = audit or AuditBound()
        self._clock = clock
        self._database: Database | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def revision(self) -> int:
        return await self._run(_revision)

    async def documents(self, kind: Kind) -> Sequence[Document]:
        return await self._run(lambda database: _documents(database, kind))

    async def document(self, kind: Kind, name: str) -> Document | None:
        return await self._run(lambda database: _document(database, kind, name))

    async def begin(self, action: Action) -> int:
        now_s = self._clock()
        return await self._run(lambda database: _begin(database, _Audit(action, self._bound, now_s, None)))

    async def apply(
        self, changes: Sequence[Change], *, action: Action, remember: Remember | None = None, begun: int | None = None
    ) -> Sequence[Document | None]:
        audit = _Audit(action, self._bound, self._clock(), begun)
        return await self._run(lambda database: _apply(database, changes, audit, remember))

    async def remembered(self, key: str) -> Remembered | None:
        since_s = self._clock() - _REMEMBERED_S
        return await self._run(lambda database: _remembered(database, key, since_s))

    async def audit(self, *, limit: int, before: int | None = None) -> Sequence[AuditEntry]:
        since_s = self._clock() - self._bound.age_s
        return await self._run(lambda database: _audit(database, limit, before, since_s))

    async def close(self) -> None:
        def end() -> None:
            if self._database is not None:
                self._database.close()
                self._database = None

        await asyncio.get_running_loop().run_in_executor(self._thread, end)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[Database], _Result]) -> _Result:
        """Do it on the store's thread. A change that was begun goes on when the caller is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, self._attempt, work)
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                return await asyncio.shield(future)
        except TimeoutError:
            raise StoreUnavailableError(f"the database did not answer within {_CALL_LIMIT_S:g} s") from None

    def _attempt(self, work: Callable[[Database], _Result]) -> _Result:
        try:
            if self._database is None:
                self._database = self._connect()
                prepare(self._database)
            return work(self._database)
        except self._unavailable as error:
            if self._database is not None:  # whatever state the connection is in, the next call gets a new one
                self._database.close()
                self._database = None
            raise StoreUnavailableError(f"the database can't be used: {error}") from error


def _revision(database: Database) -> int:
    [[revision]] = database.rows("SELECT revision FROM kvgate_revision")
    return int(revision)


def _documents(database: Database, kind: Kind) -> list[Document]:
    found = database.rows(
        "SELECT name, body, version, created_at_s, updated_at_s FROM kvgate_documents "
        "WHERE kind = ? AND body IS NOT NULL ORDER BY name",
        [kind.value],
    )
    return [_as_document(kind, row) for row in found]


def _document(database: Database, kind: Kind, name: str) -> Document | None:
    found = database.rows(
        "SELECT name, body, version, created_at_s, updated_at_s FROM kvgate_documents "
        "WHERE kind = ? AND name = ? AND body IS NOT NULL",
        [kind.value, name],
    )
    return _as_document(kind, found[0]) if found else None


def _as_document(kind: Kind, row: Row) -> Document:
    name, body, version, created_at_s, updated_at_s = row
    return Document(
        kind=kind, name=name, body=body, version=version, created_at_s=created_at_s, updated_at_s=updated_at_s
    )


class _Audit(NamedTuple):
    """What is written of a change, and what of the log is kept then."""

    action: Action
    bound: AuditBound
    now_s: float
    begun: int | None
    """The entry that ends with it; None is a new one."""


def _begin(database: Database, audit: _Audit) -> int:
    with database.transaction():
        return _entry(database, audit)


def _entry(database: Database, audit: _Audit) -> int:
    action, bound, now_s, _ = audit
    [[number]] = database.rows(
        "INSERT INTO kvgate_audit (at_s, actor, action, target, outcome, detail, request_id) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING number",
        [now_s, action.actor, action.action, action.target, action.outcome, action.detail, action.request_id],
    )
    database.execute(
        "DELETE FROM kvgate_audit WHERE at_s < ? OR number <= (SELECT MAX(number) FROM kvgate_audit) - ?",
        [now_s - bound.age_s, bound.entries],
    )
    return int(number)


def _apply(
    database: Database, changes: Sequence[Change], audit: _Audit, remember: Remember | None
) -> list[Document | None]:
    with database.transaction():
        after = [_change(database, change, audit.now_s) for change in changes]
        if changes:
            database.execute("UPDATE kvgate_revision SET revision = revision + 1")
        if audit.begun is None:
            _entry(database, audit)
        else:
            database.execute(
                "UPDATE kvgate_audit SET outcome = ?, detail = ? WHERE number = ?",
                [audit.action.outcome, audit.action.detail, audit.begun],
            )
        if remember is not None:
            _remember(database, remember(after), audit.now_s)
        return after


def _change(database: Database, change: Change, now_s: float) -> Document | None:
    found = database.rows(
        "SELECT name, body, version, created_at_s, updated_at_s FROM kvgate_documents WHERE kind = ? AND name = ?",
        [change.kind.value, change.name],
    )
    counted = int(found[0][2]) if found else 0
    present = counted if found and found[0][1] is not None else ABSENT
    wanted = change.expected
    if (wanted is not None and wanted != present) or (isinstance(change, Delete) and present == ABSENT):
        raise ConflictError(change.kind, change.name, expected=wanted, found=present)
    if isinstance(change, Delete):
        database.execute(
            "UPDATE kvgate_documents SET body = NULL, version = ?, updated_at_s = ? WHERE kind = ? AND name = ?",
            [counted + 1, now_s, change.kind.value, change.name],
        )
        return None
    created_at_s = float(found[0][3]) if present else now_s
    database.execute(
        "INSERT INTO kvgate_documents (kind, name, body, version, created_at_s, updated_at_s) "
        "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (kind, name) DO UPDATE SET body = excluded.body, "
        "version = excluded.version, created_at_s = excluded.created_at_s, updated_at_s = excluded.updated_at_s",
        [change.kind.value, change.name, change.body, counted + 1, created_at_s, now_s],
    )
    return Document(
        kind=change.kind,
        name=change.name,
        body=change.body,
        version=counted + 1,
        created_at_s=created_at_s,
        updated_at_s=now_s,
    )


def _remember(database: Database, remember: Remembered, now_s: float) -> None:
    database.execute("DELETE FROM kvgate_idempotency WHERE at_s < ?", [now_s - _REMEMBERED_S])
    if database.rows("SELECT 1 FROM kvgate_idempotency WHERE key = ?", [remember.key]):
        raise RepeatedKeyError(f"the idempotency key {remember.key!r} has been used")
    database.execute(
        "INSERT INTO kvgate_idempotency (key, request, status, body, etag, at_s) VALUES (?, ?, ?, ?, ?, ?)",
        [remember.key, remember.request, remember.status, remember.body, remember.etag, now_s],
    )


def _remembered(database: Database, key: str, since_s: float) -> Remembered | None:
    found = database.rows(
        "SELECT key, request, status, body, etag FROM kvgate_idempotency WHERE key = ? AND at_s >= ?", [key, since_s]
    )
    if not found:
        return None
    key, request, status, body, etag = found[0]
    return Remembered(key=key, request=request, status=status, body=body, etag=etag)


def _audit(database: Database, limit: int, before: int | None, since_s: float) -> list[AuditEntry]:
    found = database.rows(
        "SELECT number, at_s, actor, action, target, outcome, detail, request_id FROM kvgate_audit "
        "WHERE at_s >= ? AND number < ? ORDER BY number DESC LIMIT ?",
        [since_s, (1 << 63) - 1 if before is None else before, limit],
    )
    return [
        AuditEntry(
            number=number,
            at_s=at_s,
            action=Action(
                actor=actor, action=action, target=target, outcome=outcome, detail=detail, request_id=request_id
            ),
        )
        for number, at_s, actor, action, target, outcome, detail, request_id in found
    ]


__all__ = ["SqlStore"]
