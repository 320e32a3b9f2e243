"""What the store does, in SQL: the same statements for SQLite and PostgreSQL. Each function is given a ``Database``.

Times are those of the database's clock, so that gateways whose clocks differ agree.
"""

from collections.abc import Sequence
from time import time
from typing import Final, NamedTuple

from gateway.state.database import Database, Row
from gateway.state.documents import ABSENT, Action, AuditBound, AuditEntry, Change, Delete, Document, Kind, Remembered
from gateway.state.store import ConflictError, Remember, RepeatedKeyError

_REMEMBERED_S: Final = 24 * 3600.0
_MOST_FORGOTTEN: Final = 100
"""Rows that one change may remove for their age or number, whatever the clock says."""


def revision(database: Database) -> int:
    """Return the number that grows with every change."""
    [[revision]] = database.rows("SELECT revision FROM kvgate_revision")
    return int(revision)


def skew_s(database: Database) -> float:
    """Return by how much this machine's clock is ahead of the database's; what the call took makes no difference."""
    before_s = time()
    now_s = database.now()
    return max(0.0, before_s - now_s) + min(0.0, time() - now_s)


def documents(database: Database, kind: Kind) -> list[Document]:
    """Return all documents of a kind, by name."""
    found = database.rows(
        "SELECT name, body, version, created_at_s, updated_at_s FROM kvgate_documents "
        "WHERE kind = ? AND body IS NOT NULL ORDER BY name",
        [kind.value],
    )
    return [_as_document(kind, row) for row in found]


def document(database: Database, kind: Kind, name: str) -> Document | None:
    """Return one document, None where there is none."""
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


class Record(NamedTuple):
    """What is written of a change into the audit log, and how much of the log is kept."""

    action: Action
    bound: AuditBound
    begun: int | None = None
    """The entry that ends with it; None is a new one."""


def begin(database: Database, record: Record) -> int:
    """Write an entry of the audit log, and return its number."""
    with database.transaction():
        return _entry(database, record, database.now())


def _entry(database: Database, record: Record, now_s: float) -> int:
    action, bound, _ = record
    [[number]] = database.rows(
        "INSERT INTO kvgate_audit (at_s, actor, action, target, outcome, detail, request_id) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING number",
        [now_s, action.actor, action.action, action.target, action.outcome, action.detail, action.request_id],
    )
    database.execute(
        "DELETE FROM kvgate_audit WHERE number IN (SELECT number FROM kvgate_audit WHERE at_s < ? OR "
        "number <= (SELECT MAX(number) FROM kvgate_audit) - ? ORDER BY number LIMIT ?)",
        [now_s - bound.age_s, bound.entries, _MOST_FORGOTTEN],
    )
    return int(number)


def apply(
    database: Database, changes: Sequence[Change], record: Record, remember: Remember | None
) -> list[Document | None]:
    """Make all changes or none; raises ``ConflictError``, ``RepeatedKeyError``."""
    with database.transaction():
        now_s = database.now()
        after = [_change(database, change, now_s) for change in changes]
        if changes:
            database.execute("UPDATE kvgate_revision SET revision = revision + 1")
        if record.begun is None:
            _entry(database, record, now_s)
        else:
            database.execute(
                "UPDATE kvgate_audit SET outcome = ?, detail = ? WHERE number = ?",
                [record.action.outcome, record.action.detail, record.begun],
            )
        if remember is not None:
            _remember(database, remember(after), now_s)
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
    database.execute(
        "DELETE FROM kvgate_idempotency WHERE at_s < ? AND (key = ? OR key IN "
        "(SELECT key FROM kvgate_idempotency ORDER BY at_s LIMIT ?))",
        [now_s - _REMEMBERED_S, remember.key, _MOST_FORGOTTEN],
    )
    if database.rows("SELECT 1 FROM kvgate_idempotency WHERE key = ?", [remember.key]):
        raise RepeatedKeyError(f"the idempotency key {remember.key!r} has been used")
    database.execute(
        "INSERT INTO kvgate_idempotency (key, request, status, body, etag, at_s) VALUES (?, ?, ?, ?, ?, ?)",
        [remember.key, remember.request, remember.status, remember.body, remember.etag, now_s],
    )


def remembered(database: Database, key: str) -> Remembered | None:
    """Return what was answered to an idempotency key within the last day."""
    found = database.rows(
        "SELECT key, request, status, body, etag FROM kvgate_idempotency WHERE key = ? AND at_s >= ?",
        [key, database.now() - _REMEMBERED_S],
    )
    if not found:
        return None
    key, request, status, body, etag = found[0]
    return Remembered(key=key, request=request, status=status, body=body, etag=etag)


def audit(database: Database, limit: int, before: int | None, bound: AuditBound) -> list[AuditEntry]:
    """Return the newest entries that are not too old, newest first."""
    found = database.rows(
        "SELECT number, at_s, actor, action, target, outcome, detail, request_id FROM kvgate_audit "
        "WHERE at_s >= ? AND number < ? ORDER BY number DESC LIMIT ?",
        [database.now() - bound.age_s, (1 << 63) - 1 if before is None else before, limit],
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


__all__ = ["Record", "apply", "audit", "begin", "document", "documents", "remembered", "revision", "skew_s"]
