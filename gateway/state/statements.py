"""The operations of the store in SQL, the same for SQLite and PostgreSQL: functions of a ``Database``.

Times are those of the database's clock, so that gateways whose clocks differ agree.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from gateway.state.database import Database, Row
from gateway.state.documents import (
    ABSENT,
    Action,
    AuditBound,
    AuditEntry,
    Change,
    Delete,
    Document,
    Kind,
    Pending,
    PendingOperation,
    Reading,
    Remembered,
    Revision,
)
from gateway.state.store import (
    ConflictError,
    MalformedStoreError,
    OperationBusyError,
    OperationLostError,
    Remember,
    RepeatedKeyError,
)
from kvcontrol.core.policy_control import FENCE_LEAP, MOST_FENCE, Fence

_REMEMBERED_S: Final = 24 * 3600.0
_MOST_FORGOTTEN: Final = 100
"""Most rows that one change may remove for their age or number, also where a clock is wrong."""


def documents(database: Database, kind: Kind) -> list[Document]:
    """Return all documents of a kind, by name."""
    found = database.rows(
        "SELECT name, body, version, created_at_s, updated_at_s FROM kvgate_documents "
        "WHERE kind = ? AND body IS NOT NULL ORDER BY name",
        [kind.value],
    )
    return [_as_document(kind, row) for row in found]


def read(database: Database, kinds: Sequence[Kind], clock: Callable[[], float], known: Revision | None) -> Reading:
    """Return the revision, the documents unless it is the known one, and the skew of a clock, in one statement: a slow
    database answers once.
    """
    number, changed_at_s = known or Revision(-1)
    before_s = clock()
    found = database.rows(
        "SELECT revision, changed_at_s, now_s, kind, name, body, version, created_at_s, updated_at_s FROM "  # noqa: S608 - as many placeholders as kinds
        "(SELECT revision, (SELECT MAX(updated_at_s) FROM kvgate_documents) AS changed_at_s, "
        f"{database.clock} AS now_s FROM kvgate_revision) AS state LEFT JOIN kvgate_documents ON body IS NOT NULL AND "
        f"kind IN ({', '.join('?' * len(kinds))}) AND (revision <> ? OR COALESCE(changed_at_s, 0) <> ?) ORDER BY name",
        [*(each.value for each in kinds), number, changed_at_s],
    )
    after_s = clock()
    number, changed_at_s, now_s, *_ = _first(found, "kvgate_revision")
    by_kind: dict[Kind, list[Document]] = {each: [] for each in kinds}
    for _, _, _, kind, *row in found:
        if kind is not None:
            by_kind[Kind(kind)].append(_as_document(Kind(kind), row))
    revision = Revision(_whole(number, "kvgate_revision"), changed_at_s or 0.0)
    return Reading(
        revision=revision,
        documents=None if revision == known else by_kind,
        skew_s=max(0.0, before_s - now_s) + min(0.0, after_s - now_s),
    )


def _first(rows: Sequence[Row], table: str) -> Row:
    """Return the first row of a query of a table that always has its one row; raises ``MalformedStoreError``."""
    if not rows:
        raise MalformedStoreError(f"the store's table {table} is empty: restore the backup of the store")
    return rows[0]


def _whole(value: object, table: str) -> int:
    """Return a whole number of a table: SQLite stores any text there. Raises ``MalformedStoreError``."""
    if not isinstance(value, int):
        raise MalformedStoreError(
            f"the store's table {table} contains {value!r:.100} in place of a number: restore the backup of the store"
        )
    return value


def _seconds(value: object, table: str) -> float:
    if not isinstance(value, int | float):
        raise MalformedStoreError(
            f"the store's table {table} contains {value!r:.100} in place of a time: restore the backup of the store"
        )
    return value


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
    """The audit entry of a change, and how much of the log is kept."""

    action: Action
    bound: AuditBound
    completes: int | None = None
    """The pending operation whose entry it replaces; None is a new entry."""


def begin(database: Database, record: Record, lease_s: float, excludes: Collection[str] = ()) -> int:
    """Write an entry of the audit log and a pending operation, and return their number; raises
    ``OperationBusyError``.
    """
    with database.transaction() as now_s:
        for each in pending(database).operations if excludes else ():
            if each.action.action in excludes and not each.abandoned:
                raise OperationBusyError(
                    f"{each.action.action} {each.action.target} by {each.action.actor} has not ended "
                    f"(entry {each.number} of the audit log)"
                )
        number = _entry(database, record, now_s)
        database.execute(
            "INSERT INTO kvgate_acts (number, note, until_s, abandoned) VALUES (?, '', ?, 0)", [number, now_s + lease_s]
        )
        return number


def note(database: Database, number: int, text: str, lease_s: float, above: int) -> Fence:
    """Write how to undo an operation, and issue two fences; return the first one. Raises ``OperationLostError``."""
    with database.transaction() as now_s:
        if not database.rows(
            "UPDATE kvgate_acts SET note = ?, until_s = ? WHERE number = ? AND abandoned = 0 RETURNING number",
            [text, now_s + lease_s, number],
        ):
            raise _lost(number)
        store, last = _issue(database, 2, above)
        return Fence(store, last - 1)


def advance(database: Database, above: int) -> None:
    """Let all new fences be newer than ``above``."""
    with database.transaction():
        _issue(database, 1, above)


def _issue(database: Database, count: int, above: int = 0) -> tuple[str, int]:
    """Issue some fences, newer than ``above`` unless that is too far ahead to be the store's own; return the store's
    identity and the last of them.
    """
    known = min(above, MOST_FENCE)
    issued = database.rows(
        "UPDATE kvgate_fence SET number = CASE WHEN number < ? AND number > ? THEN ? ELSE number END + ? "
        "RETURNING store, number",
        [known, known - FENCE_LEAP - 1, known, count],
    )
    return _fence(issued)


def _fence(rows: Sequence[Row]) -> tuple[str, int]:
    store, number, *_ = _first(rows, "kvgate_fence")
    return str(store), _whole(number, "kvgate_fence")


def hold(database: Database, numbers: Sequence[int], lease_s: float) -> None:
    """Keep pending operations for another ``lease_s``."""
    database.execute(
        f"UPDATE kvgate_acts SET until_s = {database.clock} + ? WHERE number IN ({', '.join('?' * len(numbers))})",  # noqa: S608 - as many placeholders as numbers
        [lease_s, *numbers],
    )


def pending(database: Database) -> Pending:
    """Return the newest fence and the pending operations."""
    found = database.rows(
        f"SELECT kvgate_fence.store, kvgate_fence.number, {database.clock}, kvgate_acts.number, note, until_s, "  # noqa: S608 - no value is in it
        "abandoned, actor, action, target, outcome, detail, request_id FROM kvgate_fence "
        "LEFT JOIN kvgate_acts ON 1 = 1 LEFT JOIN kvgate_audit ON kvgate_audit.number = kvgate_acts.number "
        "ORDER BY kvgate_acts.number"
    )
    fence = Fence(*_fence(found))
    now_s = found[0][2]
    return Pending(
        fence,
        [
            PendingOperation(
                number=number,
                action=Action(
                    actor=actor, action=action, target=target, outcome=outcome, detail=detail, request_id=request_id
                ),
                note=text,
                left_s=_seconds(until_s, "kvgate_acts") - now_s,
                abandoned=bool(abandoned),
            )
            for _, _, _, number, text, until_s, abandoned, actor, action, target, outcome, detail, request_id in found
            if actor is not None
        ],
    )


def take(database: Database, number: int, lease_s: float) -> Fence | None:
    """Take over an operation whose lease expired, and issue a fence; None where another gateway took it over."""
    with database.transaction() as now_s:
        if not database.rows(
            "UPDATE kvgate_acts SET until_s = ?, abandoned = 1 WHERE number = ? AND until_s < ? RETURNING number",
            [now_s + lease_s, number, now_s],
        ):
            return None
        return Fence(*_issue(database, 1))


def abandon(database: Database, number: int, action: Action) -> None:
    """Write the outcome of an operation and let any gateway take it over; raises ``OperationLostError``."""
    with database.transaction():
        if not database.rows(
            "UPDATE kvgate_acts SET until_s = 0, abandoned = 1 WHERE number = ? AND abandoned = 0 RETURNING number",
            [number],
        ):
            raise _lost(number)
        _outcome(database, number, action)


def _lost(number: int) -> OperationLostError:
    return OperationLostError(f"operation {number} has ended or is undone by another gateway: its lease expired")


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


def _outcome(database: Database, number: int, action: Action) -> None:
    database.execute(
        "UPDATE kvgate_audit SET outcome = ?, detail = ? WHERE number = ?", [action.outcome, action.detail, number]
    )


def apply(
    database: Database, changes: Sequence[Change], record: Record, remember: Remember | None
) -> list[Document | None]:
    """Make all changes or none; raises ``ConflictError``, ``RepeatedKeyError``, ``OperationLostError``."""
    with database.transaction() as now_s:
        after = [_change(database, change, now_s) for change in changes]
        if changes:
            changed = database.rows("UPDATE kvgate_revision SET revision = revision + 1 RETURNING revision")
            _first(changed, "kvgate_revision")  # gateways would not notice the change
        if record.completes is None:
            _entry(database, record, now_s)
        elif not database.rows("DELETE FROM kvgate_acts WHERE number = ? RETURNING number", [record.completes]):
            raise _lost(record.completes)
        else:
            _outcome(database, record.completes, record.action)
        if remember is not None:
            _remember(database, remember(after), now_s)
        return after


def _change(database: Database, change: Change, now_s: float) -> Document | None:
    found = database.rows(
        "SELECT name, body, version, created_at_s, updated_at_s FROM kvgate_documents WHERE kind = ? AND name = ?",
        [change.kind.value, change.name],
    )
    counted = _whole(found[0][2], "kvgate_documents") if found else 0
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
    """Return the answer to an idempotency key within the last day."""
    found = database.rows(
        "SELECT key, request, status, body, etag FROM kvgate_idempotency "  # noqa: S608 - no value is in it
        f"WHERE key = ? AND at_s >= {database.clock} - ?",
        [key, _REMEMBERED_S],
    )
    if not found:
        return None
    key, request, status, body, etag = found[0]
    return Remembered(key=key, request=request, status=status, body=body, etag=etag)


def audit(database: Database, limit: int, before: int | None, bound: AuditBound) -> list[AuditEntry]:
    """Return the newest entries that are not too old, newest first."""
    found = database.rows(
        "SELECT number, at_s, actor, action, target, outcome, detail, request_id FROM kvgate_audit "  # noqa: S608 - no value is in it
        f"WHERE at_s >= {database.clock} - ? AND number < ? ORDER BY number DESC LIMIT ?",
        [bound.age_s, (1 << 63) - 1 if before is None else before, limit],
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
