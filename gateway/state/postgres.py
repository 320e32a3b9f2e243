"""PostgreSQL, the store of gateways on several hosts. The driver is the optional dependency ``kvgate[postgres]``."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from gateway.errors import StateError
from gateway.state.documents import AuditBound
from gateway.state.schema import Row, SchemaError, prepare
from gateway.state.sql import SqlStore

try:
    import psycopg
except ModuleNotFoundError as error:
    raise StateError("store_url names PostgreSQL, whose driver is not installed: pip install 'kvgate[postgres]'") from (
        error
    )

_CONNECT_S = 5
_LOCK = 0x6B76_6761_7465
"""Number of the advisory lock that makes writers take turns, as SQLite's do: changes are rare and small."""


class PostgresDatabase:
    """One connection. A statement that takes longer than ten seconds fails."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=_CONNECT_S,
            application_name="kvgate",
            options="-c statement_timeout=10000 -c lock_timeout=10000 -c client_min_messages=warning",
        )

    @property
    def serial(self) -> str:
        return "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"

    def tables(self) -> frozenset[str]:
        found = self.rows("SELECT tablename FROM pg_tables WHERE schemaname = ANY (current_schemas(false))")
        return frozenset(name for (name,) in found)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._connection.transaction():
            self._connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            yield

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> Sequence[Row]:
        return self._connection.execute(_translated(statement), parameters).fetchall()

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> None:
        self._connection.execute(_translated(statement), parameters)

    def close(self) -> None:
        self._connection.close()


def _translated(statement: str) -> bytes:
    return statement.replace("?", "%s").encode()


def open_postgres(url: str, audit: AuditBound | None = None) -> SqlStore:
    """Return the store at ``url``; raises ``StateError`` when it can't be reached or used."""
    try:
        with closing(PostgresDatabase(url)) as database:
            prepare(database)
    except (psycopg.Error, SchemaError) as error:
        raise StateError(f"store_url: PostgreSQL can't be used: {str(error).strip()}") from error
    return SqlStore(lambda: PostgresDatabase(url), unavailable=(psycopg.Error,), audit=audit)


__all__ = ["PostgresDatabase", "open_postgres"]
