"""Rows that SQLite holds though no gateway wrote them: the store can't be used, for that reason and with its name."""

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from time import time

import pytest

from gateway.state import Action, Delete, Kind, Put, Store, StoreUnavailableError, open_sqlite
from gateway.state.sqlite import FILE_NAME

ACT = Action(actor="admin", action="swap", target="eviction")
Call = Callable[[Store, int], Awaitable[object]]


def put(store: Store, _: int) -> Awaitable[object]:
    return store.apply([Put(kind=Kind.TENANT, name="acme", body="{}")], action=ACT)


MALFORMED: dict[str, tuple[str, Call]] = {
    "no revision, read": ("DELETE FROM kvgate_revision", lambda store, _: store.read([Kind.KEY], time)),
    "no revision, put": ("DELETE FROM kvgate_revision", put),
    "revision": ("UPDATE kvgate_revision SET revision = 'x'", lambda store, _: store.read([Kind.KEY], time)),
    "version, put": ("UPDATE kvgate_documents SET version = 'x'", put),
    "version, delete": (
        "UPDATE kvgate_documents SET version = 'x'",
        lambda store, _: store.apply([Delete(kind=Kind.TENANT, name="acme")], action=ACT),
    ),
    "no fence, pending": ("DELETE FROM kvgate_fence", lambda store, _: store.pending()),
    "no fence, note": ("DELETE FROM kvgate_fence", lambda store, number: store.note(number, "", lease_s=5)),
    "no fence, advance": ("DELETE FROM kvgate_fence", lambda store, _: store.advance(5)),
    "no fence, take": ("DELETE FROM kvgate_fence", lambda store, number: store.take(number, lease_s=5)),
    "no fence, begin": ("DELETE FROM kvgate_fence", lambda store, _: store.begin(ACT, lease_s=5, excludes={"swap"})),
    "fence": ("UPDATE kvgate_fence SET number = 'x'", lambda store, _: store.pending()),
    "lease": ("UPDATE kvgate_acts SET until_s = 'x'", lambda store, _: store.pending()),
}


@pytest.mark.parametrize(("statement", "call"), MALFORMED.values(), ids=MALFORMED)
async def test_a_call_that_meets_a_malformed_row_finds_the_store_unusable_and_names_the_table(
    tmp_path: Path, statement: str, call: Call
) -> None:
    store = open_sqlite(tmp_path)
    try:
        await put(store, 0)
        number = await store.begin(ACT, lease_s=-1)
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as connection:
            connection.execute(statement)
        with pytest.raises(StoreUnavailableError, match=r"table kvgate_\w+ .*restore the backup"):
            await call(store, number)
    finally:
        await store.close()


async def test_a_store_whose_schema_is_no_number_can_not_be_used(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path)
    try:
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as connection:
            connection.execute("UPDATE kvgate_schema SET version = 'x'")
        with pytest.raises(StoreUnavailableError, match="kvgate_schema contains 'x'"):
            await store.pending()
    finally:
        await store.close()
