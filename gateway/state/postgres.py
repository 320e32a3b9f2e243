"""PostgreSQL, the store of gateways on several hosts. The driver is the optional dependency ``kvgate[postgres]``."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from math import ceil
from threading import Event, Timer
from typing import Final

from gateway.errors import StateError
from gateway.state.database import CommitUnknownError, Row
from gateway.state.documents import AuditBound
from gateway.state.schema import SchemaError, prepare
from gateway.state.sql import CALL_LIMIT_S, SqlStore

try:
    import psycopg
    import psycopg.conninfo
except ModuleNotFoundError as error:
    raise StateError("store_url names PostgreSQL, whose driver is not installed: pip install 'kvgate[postgres]'") from (
        error
    )

_LOCK: Final = 0x6B76_6761_7465
"""Number of the advisory lock that admits one writer at a time, as SQLite does: changes are rare and small."""

_CLOCK: Final = "EXTRACT(EPOCH FROM clock_timestamp())::float8"
_BEGIN: Final = f"BEGIN; SELECT pg_advisory_xact_lock({_LOCK}); SELECT {_CLOCK}"
_KEEPALIVE_S: Final = 5
_LEAST_CONNECT_S: Final = 2
"""The shortest time limit of PostgreSQL's driver for a connection."""


class SilentServerError(Exception):
    """The server of a connection has stopped answering."""


class PostgresDatabase:
    """One connection. The server ends a statement that takes longer than ``limit_s``. ``abort`` ends the connection to
    a server that hangs, and TCP's keepalives end the connection to a host that disappeared.

    Unless the URL names its own ``target_session_attrs``, a standby is refused: a revoked key would be accepted for as
    long as the standby lags behind.
    """

    def __init__(self, url: str, *, limit_s: float = CALL_LIMIT_S) -> None:
        limit_ms = ceil(limit_s * 1000)
        server = psycopg.conninfo.conninfo_to_dict(url).get("target_session_attrs", "primary")
        self._connection = psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=_connect_limit_s(limit_s),
            application_name="kvgate",
            options=f"-c statement_timeout={limit_ms} -c lock_timeout={limit_ms} -c client_min_messages=warning",
            keepalives=1,
            keepalives_idle=_KEEPALIVE_S,
            keepalives_interval=_KEEPALIVE_S,
            keepalives_count=2,
            tcp_user_timeout=limit_ms,
            target_session_attrs=server,
        )

    @property
    def serial(self) -> str:
        return "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"

    @property
    def lost(self) -> bool:
        return self._connection.broken

    def tables(self) -> frozenset[str]:
        found = self.rows("SELECT tablename FROM pg_tables WHERE schemaname = ANY (current_schemas(false))")
        return frozenset(name for (name,) in found)

    @property
    def clock(self) -> str:
        return _CLOCK

    def check(self) -> None:
        """Do nothing: a connection never changes its server."""

    @contextmanager
    def transaction(self) -> Iterator[float]:
        try:
            begun = self._connection.execute(_BEGIN, prepare=False)  # several statements in one round trip
            while begun.nextset():
                pass
            [[now_s]] = begun.fetchall()
            yield float(now_s)
        except BaseException:
            with suppress(psycopg.Error):  # the server rolls back the transaction of a lost connection
                self._connection.execute("ROLLBACK")
            raise
        try:
            self._connection.execute("COMMIT")
        except psycopg.Error as error:
            if self._connection.broken:
                raise CommitUnknownError(str(error).strip()) from error
            raise

    def rows(self, statement: str, parameters: Sequence[object] = ()) -> Sequence[Row]:
        return self._connection.execute(_translated(statement), parameters).fetchall()

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> None:
        self._connection.execute(_translated(statement), parameters)

    def abort(self) -> None:
        with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def _translated(statement: str) -> bytes:
    return statement.replace("?", "%s").encode()


def _connect_limit_s(limit_s: float) -> int:
    return max(_LEAST_CONNECT_S, ceil(limit_s))


def _place(url: str) -> str:
    """Return the hosts of a URL and their ports, without the password."""
    named = psycopg.conninfo.conninfo_to_dict(url)
    host = named.get("host") or named.get("hostaddr") or "the default host"
    return f"{host}, port {named.get('port') or 5432}"


@contextmanager
def _answering(database: PostgresDatabase, limit_s: float) -> Iterator[None]:
    """End the connection of a block that takes longer than ``limit_s``: raises ``SilentServerError``."""
    over = Event()

    def leave() -> None:
        over.set()
        database.abort()

    timer = Timer(limit_s, leave)
    timer.start()
    try:
        yield
    except (psycopg.Error, CommitUnknownError) as error:
        if over.is_set():
            raise SilentServerError from error
        raise
    finally:
        timer.cancel()
        timer.join()


def open_postgres(url: str, audit: AuditBound | None = None, *, limit_s: float = CALL_LIMIT_S) -> SqlStore:
    """Return the store at ``url``; raises ``StateError`` when it can't be reached or used. Blocks for about twice
    ``limit_s`` at most for each of its servers.
    """
    start_limit_s = _connect_limit_s(limit_s)
    try:
        with closing(PostgresDatabase(url, limit_s=start_limit_s)) as database, _answering(database, start_limit_s):
            prepare(database)
    except (psycopg.errors.ConnectionTimeout, SilentServerError) as error:
        raise StateError(
            f"store_url: PostgreSQL can't be used: {_place(url)} did not answer within {start_limit_s} s; look at the "
            "server and at the network, then start the gateway again"
        ) from error
    except (psycopg.Error, CommitUnknownError, SchemaError) as error:
        raise StateError(f"store_url: PostgreSQL can't be used: {str(error).strip()}") from error
    return SqlStore(
        lambda: PostgresDatabase(url, limit_s=limit_s), unavailable=(psycopg.Error,), audit=audit, limit_s=limit_s
    )
