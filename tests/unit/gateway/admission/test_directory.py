"""The directory of a store whose documents or rows are damaged: a revoked key never stays in force."""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from time import time

import pytest

from gateway.admission import Directory, DirectoryKeeper
from gateway.problems import ProblemKind, Problems
from gateway.state import Action, Kind, Put, Store, StoreUnavailableError, open_sqlite
from gateway.state.shared_clock import SharedClock
from gateway.state.sqlite import FILE_NAME
from tests.support.running_gateway import eventually

ACT = Action(actor="admin", action="put", target="t")
KEY = '{"tenant": "acme", "digest": "ab"}'
DIGEST = bytes.fromhex("ab")
DAMAGED = {
    "deep array": "[" * 1100 + "]" * 1100,
    "deep object": '{"a":' * 1100 + "1" + "}" * 1100,
    "deep field": '{"a":' + "[" * 600 + "]" * 600 + "}",
    "unended": "[" * 100_000,
    "long number": '{"a":' + "9" * 5000 + "}",
    "half a surrogate": '{"a": "\\ud800"}',
    "zero byte": "\x00",
    "empty": "",
}


class Gateway:
    """A directory keeper on a store, with the state that it passed on; ``fails`` makes that raise."""

    def __init__(self, store: Store, *, trust_s: float) -> None:
        self.store = store
        self.problems = Problems()
        self.published: Directory | None = None
        self.expired = asyncio.Event()
        self.fails = False
        self.keeper = DirectoryKeeper(
            store,
            publish=self._publish,
            expire=self.expired.set,
            trust_s=trust_s,
            clock=SharedClock(time, time),
            problems=self.problems,
        )

    def _publish(self, directory: Directory) -> None:
        if self.fails:
            raise ValueError("unexpected")
        self.published = directory

    def accepts_key(self) -> bool:
        return self.published is not None and DIGEST in self.published.keys


@asynccontextmanager
async def gateway_on(folder: Path, *, trust_s: float = 3600.0) -> AsyncIterator[Gateway]:
    """Run the loop of a gateway whose store has one key."""
    store = open_sqlite(folder)
    try:
        gateway = Gateway(store, trust_s=trust_s)
        await store.apply([Put(kind=Kind.KEY, name="k", body=KEY)], action=ACT)
        await gateway.keeper.refresh()
        assert gateway.accepts_key()
        task = asyncio.create_task(gateway.keeper.run(0.01))
        try:
            yield gateway
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        await store.close()


def changed(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / FILE_NAME, isolation_level=None)) as connection:
        connection.execute(statement)


@pytest.mark.parametrize("body", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("kind", Kind)
async def test_a_damaged_document_of_any_kind_keeps_no_revoked_key_in_force(
    tmp_path: Path, kind: Kind, body: str
) -> None:
    async with gateway_on(tmp_path) as gateway:
        await gateway.store.apply([Put(kind=kind, name="damaged", body=body)], action=ACT)
        await gateway.keeper.refresh()
        assert gateway.accepts_key()
        revoked = KEY.replace("}", ', "revoked_at_s": 1}')
        await gateway.store.apply([Put(kind=Kind.KEY, name="k", body=revoked)], action=ACT)
        await eventually(lambda: not gateway.accepts_key())
        assert gateway.problems.counts()[ProblemKind.STORE] == 0


@pytest.mark.parametrize("statement", ["DELETE FROM kvgate_revision", "UPDATE kvgate_revision SET revision = 'many'"])
async def test_a_store_without_its_revision_can_not_be_read_and_ends_the_trust(tmp_path: Path, statement: str) -> None:
    async with gateway_on(tmp_path, trust_s=0.2) as gateway:
        changed(tmp_path, statement)
        await gateway.expired.wait()
        await eventually(lambda: gateway.problems.counts()[ProblemKind.STORE] == 1)
        [problem] = gateway.problems.all()
        assert "can't be read" in problem.message


async def test_a_store_without_its_revision_takes_no_change_that_gateways_would_not_notice(tmp_path: Path) -> None:
    async with gateway_on(tmp_path) as gateway:
        changed(tmp_path, "DELETE FROM kvgate_revision")
        with pytest.raises(StoreUnavailableError, match="kvgate_revision is empty: restore the backup"):
            await gateway.store.apply([Put(kind=Kind.KEY, name="k", body="{}")], action=ACT)
        found = await gateway.store.document(Kind.KEY, "k")
        assert found is not None
        assert found.body == KEY


async def test_an_unexpected_error_is_logged_once_and_ends_the_trust_until_it_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_on(tmp_path, trust_s=0.2) as gateway:
        gateway.fails = True
        await gateway.store.apply([Put(kind=Kind.TENANT, name="acme", body="{}")], action=ACT)
        await gateway.expired.wait()
        await eventually(lambda: gateway.problems.counts()[ProblemKind.STORE] == 1)
        assert "ValueError: unexpected" in gateway.problems.all()[0].message
        assert len([each for each in caplog.records if each.levelno == logging.ERROR and each.exc_info]) == 1
        gateway.fails = False
        await eventually(lambda: not gateway.problems.all())
        assert gateway.published is not None
        assert "acme" in gateway.published.tenants
