"""The schema of the store, its version, and the migrations between versions.

Gateways of two neighbouring versions share a store while they are upgraded: a migration may only add what the version
before ignores. Each migration states the oldest version that may use the store after it. An older version than
that does not start, and a running one reports the store as unavailable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from gateway.state.database import Database


class SchemaError(Exception):
    """The store has a schema that this version must not use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """Leads to ``version``; versions from ``oldest`` on can use the store afterwards."""

    version: int
    oldest: int
    statements: tuple[str, ...]


MIGRATIONS: Final = (
    Migration(
        version=1,
        oldest=1,
        statements=(
            (
                "CREATE TABLE IF NOT EXISTS kvgate_revision (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), "
                "revision BIGINT NOT NULL)"
            ),
            "INSERT INTO kvgate_revision (only_row, revision) VALUES (1, 0) ON CONFLICT DO NOTHING",
            (
                "CREATE TABLE IF NOT EXISTS kvgate_documents (kind TEXT NOT NULL, name TEXT NOT NULL, body TEXT, "
                "version BIGINT NOT NULL, created_at_s DOUBLE PRECISION NOT NULL, "
                "updated_at_s DOUBLE PRECISION NOT NULL, PRIMARY KEY (kind, name))"
            ),
            (
                "CREATE TABLE IF NOT EXISTS kvgate_audit (number {serial}, at_s DOUBLE PRECISION NOT NULL, "
                "actor TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL, outcome TEXT NOT NULL, "
                "detail TEXT NOT NULL, request_id TEXT NOT NULL)"
            ),
            "CREATE INDEX IF NOT EXISTS kvgate_audit_at ON kvgate_audit (at_s)",
            (
                "CREATE TABLE IF NOT EXISTS kvgate_idempotency (key TEXT PRIMARY KEY, request TEXT NOT NULL, "
                "status INTEGER NOT NULL, body TEXT NOT NULL, etag TEXT NOT NULL, at_s DOUBLE PRECISION NOT NULL)"
            ),
        ),
    ),
    Migration(
        version=2,
        oldest=1,
        statements=(
            (
                "CREATE TABLE IF NOT EXISTS kvgate_schema (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), "
                "version BIGINT NOT NULL, oldest BIGINT NOT NULL)"
            ),
        ),
    ),
    Migration(
        version=3,
        oldest=1,
        statements=(
            (
                "CREATE TABLE IF NOT EXISTS kvgate_acts (number BIGINT PRIMARY KEY, note TEXT NOT NULL, "
                "until_s DOUBLE PRECISION NOT NULL, abandoned INTEGER NOT NULL)"
            ),
        ),
    ),
    Migration(
        version=4,
        oldest=1,
        statements=(
            (
                "CREATE TABLE IF NOT EXISTS kvgate_fence (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), "
                "store TEXT NOT NULL, number BIGINT NOT NULL)"
            ),
            ("INSERT INTO kvgate_fence (only_row, store, number) VALUES (1, '{new_id}', 0) ON CONFLICT DO NOTHING"),
        ),
    ),
)
"""Versions before 2 did not record theirs. A deleted document stays as a row without a body, so that its version
continues.
"""

VERSION: Final = MIGRATIONS[-1].version


def prepare(database: Database, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the store to the version of these migrations, or leave a newer one as it is; raises ``SchemaError`` for one
    that is too new. Takes no lock where there is nothing to do.
    """
    if not _current(database, migrations):
        with database.transaction():
            if not _current(database, migrations):
                _migrate(database, migrations)


def _current(database: Database, migrations: Sequence[Migration]) -> bool:
    version = migrations[-1].version
    if "kvgate_schema" not in database.tables():
        return False
    found = database.rows("SELECT version, oldest FROM kvgate_schema")
    if not found:
        return False
    [[present, oldest]] = found
    if not isinstance(present, int) or not isinstance(oldest, int):
        raise SchemaError(
            f"the store's table kvgate_schema contains {present!r:.100} and {oldest!r:.100} in place of numbers: "
            "restore the backup of the store"
        )
    if oldest > version:
        raise SchemaError(
            f"the store has schema {present}, which gateways of schema {oldest} or newer can use; "
            f"this one has schema {version}: start a newer version of kvgate, or restore the backup of the store"
        )
    return present >= version


def _migrate(database: Database, migrations: Sequence[Migration]) -> None:
    known = "kvgate_schema" in database.tables()
    found = database.rows("SELECT version FROM kvgate_schema") if known else []
    present = int(found[0][0]) if found else 0
    for migration in migrations:
        if migration.version > present:
            for statement in migration.statements:
                database.execute(statement.format(serial=database.serial, new_id=uuid4().hex))
    last = migrations[-1]
    database.execute(
        "INSERT INTO kvgate_schema (only_row, version, oldest) VALUES (1, ?, ?) "
        "ON CONFLICT (only_row) DO UPDATE SET version = excluded.version, oldest = excluded.oldest",
        [last.version, last.oldest],
    )
