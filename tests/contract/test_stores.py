"""What every store must do, on SQLite and on a real PostgreSQL."""

import asyncio
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import time

import pytest

from gateway.errors import StateError
from gateway.state import (
    ABSENT,
    Action,
    AuditBound,
    ConflictError,
    Delete,
    Kind,
    OperationBusyError,
    OperationLostError,
    Put,
    Remembered,
    RepeatedKeyError,
    Store,
    StoreUnavailableError,
    open_sqlite,
)
from gateway.state.postgres import open_postgres
from gateway.state.sqlite import FILE_NAME
from tests.support.databases import postgres
from tests.support.skewed import skewed
from tests.support.stored_revision import revision_of

ACT = Action(actor="admin", action="put", target="tenant/acme")
Opener = Callable[..., Store]


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the same store each time: each call is another gateway."""
    if request.param == "sqlite":
        return lambda audit=None: open_sqlite(tmp_path, audit)
    url = request.getfixturevalue("postgres_url")
    _emptied(url)
    return lambda audit=None: open_postgres(url, audit)


def _emptied(url: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        for table in ("schema", "fence", "acts", "revision", "documents", "audit", "idempotency"):
            connection.execute(f"DROP TABLE IF EXISTS kvgate_{table}".encode())


@pytest.fixture
async def store(opener: Opener) -> AsyncIterator[Store]:
    opened = opener()
    yield opened
    await opened.close()


async def test_an_empty_store_holds_nothing(store: Store) -> None:
    assert (await revision_of(store)).number == 0
    assert list(await store.documents(Kind.TENANT)) == []
    assert await store.document(Kind.TENANT, "acme") is None
    assert list(await store.audit(limit=10)) == []
    assert await store.remembered("k") is None


async def test_a_document_is_read_back_by_kind_and_name_with_its_version(store: Store) -> None:
    [made] = await store.apply([Put(kind=Kind.TENANT, name="acme", body='{"a": "ü?%"}')], action=ACT)
    assert made is not None
    assert made.version == 1
    assert await store.document(Kind.TENANT, "acme") == made
    assert await store.document(Kind.KEY, "acme") is None
    [changed] = await store.apply([Put(kind=Kind.TENANT, name="acme", body="{}")], action=ACT)
    assert changed is not None
    assert (changed.version, changed.body, changed.created_at_s) == (2, "{}", made.created_at_s)
    assert list(await store.documents(Kind.TENANT)) == [changed]
    assert (await revision_of(store)).number == 2


async def test_documents_come_by_name(store: Store) -> None:
    for name in ("b", "a", "c"):
        await store.apply([Put(kind=Kind.KEY, name=name, body="{}")], action=ACT)
    assert [each.name for each in await store.documents(Kind.KEY)] == ["a", "b", "c"]


async def test_a_reading_is_the_revision_and_the_documents_of_its_kinds_by_name(store: Store) -> None:
    kinds = [Kind.KEY, Kind.TENANT]
    empty = await store.read(kinds, time)
    assert (empty.revision, empty.documents) == (await revision_of(store), {Kind.KEY: [], Kind.TENANT: []})
    for kind, name in ((Kind.KEY, "b"), (Kind.TENANT, "x"), (Kind.KEY, "a"), (Kind.QUOTA, "x"), (Kind.KEY, "gone")):
        await store.apply([Put(kind=kind, name=name, body="{}")], action=ACT)
    await store.apply([Delete(kind=Kind.KEY, name="gone")], action=ACT)
    stored = await store.read(kinds, time, known=empty.revision)
    assert stored.revision == await revision_of(store)
    assert stored.documents == {kind: list(await store.documents(kind)) for kind in kinds}
    assert [each.name for each in stored.documents[Kind.KEY]] == ["a", "b"]
    again = await store.read(kinds, time, known=stored.revision)
    assert (again.revision, again.documents) == (stored.revision, None)
    assert again.skew_s == 0
    assert abs((await store.read(kinds, lambda: time() - 100)).skew_s + 100) < 60


@pytest.mark.parametrize("expected", [ABSENT, 2, 7])
async def test_a_change_that_expects_another_version_changes_nothing(store: Store, expected: int) -> None:
    await store.apply([Put(kind=Kind.TENANT, name="acme", body="1")], action=ACT)
    with pytest.raises(ConflictError) as conflict:
        await store.apply(
            [
                Put(kind=Kind.TENANT, name="other", body="1"),
                Put(kind=Kind.TENANT, name="acme", body="2", expected=expected),
            ],
            action=ACT,
            remember=lambda _: Remembered(key="k", request="r", status=200, body="{}"),
        )
    assert (conflict.value.name, conflict.value.found) == ("acme", 1)
    assert [each.body for each in await store.documents(Kind.TENANT)] == ["1"]
    assert (await revision_of(store)).number == 1
    assert len(await store.audit(limit=10)) == 1
    assert await store.remembered("k") is None


async def test_a_deleted_document_goes_on_counting_when_it_is_made_again(store: Store) -> None:
    await store.apply([Put(kind=Kind.TENANT, name="acme", body="1", expected=ABSENT)], action=ACT)
    assert list(await store.apply([Delete(kind=Kind.TENANT, name="acme", expected=1)], action=ACT)) == [None]
    assert await store.document(Kind.TENANT, "acme") is None
    with pytest.raises(ConflictError):
        await store.apply([Delete(kind=Kind.TENANT, name="acme")], action=ACT)
    [made] = await store.apply([Put(kind=Kind.TENANT, name="acme", body="2", expected=ABSENT)], action=ACT)
    assert made is not None
    assert made.version == 3


async def test_of_many_writers_that_expect_the_same_version_one_wins(opener: Opener) -> None:
    stores = [opener() for _ in range(3)]
    try:
        await stores[0].apply([Put(kind=Kind.QUOTA, name="acme", body="0")], action=ACT)
        ended = await asyncio.gather(
            *(
                store.apply([Put(kind=Kind.QUOTA, name="acme", body=str(number), expected=1)], action=ACT)
                for number in range(4)
                for store in stores
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(each, ConflictError) for each in ended) == 11
        assert (await revision_of(stores[1])).number == 2
    finally:
        for store in stores:
            await store.close()


async def test_what_one_gateway_wrote_another_one_reads(opener: Opener) -> None:
    writer, reader = opener(), opener()
    try:
        before = await revision_of(reader)
        await writer.apply([Put(kind=Kind.KEY, name="k", body="{}")], action=ACT)
        assert await revision_of(reader) > before
        assert len(await reader.documents(Kind.KEY)) == 1
    finally:
        await writer.close()
        await reader.close()


async def test_of_the_audit_log_the_newest_entries_are_kept(opener: Opener) -> None:
    store = opener(AuditBound(entries=3))
    for number in range(7):
        await store.apply([], action=replace(ACT, target=f"tenant/{number}"))
    kept = await store.audit(limit=100)
    await store.close()
    assert [each.action.target for each in kept] == ["tenant/6", "tenant/5", "tenant/4"]
    more = opener(AuditBound(entries=100))  # what was let go is gone, whoever looks
    assert len(await more.audit(limit=100)) == 3
    await more.close()


async def test_an_entry_of_the_audit_log_is_not_shown_beyond_its_age_and_gone_with_the_next(opener: Opener) -> None:
    store = opener(AuditBound(age_s=0.3))
    await store.apply([], action=ACT)
    async with asyncio.timeout(20):
        while await store.audit(limit=10):
            await asyncio.sleep(0.05)
    patient = opener(AuditBound())
    assert len(await patient.audit(limit=10)) == 1
    await store.apply([], action=ACT)
    assert len(await patient.audit(limit=10)) == 1
    await store.close()
    await patient.close()


async def test_the_audit_log_is_read_newest_first_and_page_by_page(store: Store) -> None:
    for number in range(5):
        action = Action(
            actor="admin", action="put", target=str(number), outcome="refused", detail='{"n": 1}', request_id="r"
        )
        await store.apply([], action=action)
    newest = await store.audit(limit=2)
    assert [each.action.target for each in newest] == ["4", "3"]
    assert newest[0].action.outcome == "refused"
    assert newest[0].at_s > 1e9
    rest = await store.audit(limit=10, before=newest[-1].number)
    assert [each.action.target for each in rest] == ["2", "1", "0"]
    assert (await revision_of(store)).number == 0


async def test_an_entry_that_was_begun_ends_in_its_place_with_the_changes_or_not_at_all(store: Store) -> None:
    number = await store.begin(replace(ACT, outcome="begun"), lease_s=60)
    await store.apply([], action=replace(ACT, target="another"))
    with pytest.raises(ConflictError):
        await store.apply([Delete(kind=Kind.TENANT, name="acme")], action=ACT, completes=number)
    assert [each.action.outcome for each in await store.audit(limit=10)] == ["done", "begun"]
    await store.apply(
        [Put(kind=Kind.TENANT, name="acme", body="1")], action=replace(ACT, detail='{"n": 1}'), completes=number
    )
    assert [(each.number, each.action.target, each.action.detail) for each in await store.audit(limit=10)] == [
        (number + 1, "another", "{}"),
        (number, ACT.target, '{"n": 1}'),
    ]
    assert (await store.audit(limit=10))[1].action.outcome == "done"


async def test_an_operation_is_pending_until_its_owner_or_the_gateway_that_took_it_over_ends_it(opener: Opener) -> None:
    owner, other = opener(), opener()
    number = await owner.begin(replace(ACT, outcome="begun"), lease_s=3600)
    await owner.note(number, "what to undo", lease_s=3600)
    [operation] = (await other.pending()).operations
    seen = (operation.number, operation.action.target, operation.note, operation.abandoned)
    assert seen == (number, ACT.target, "what to undo", False)
    assert 0 < operation.left_s <= 3600
    assert not await other.take(number, lease_s=60)  # its owner is there
    await owner.hold([number], lease_s=-1)
    assert (await other.pending()).operations[0].left_s < 0
    assert await other.take(number, lease_s=60)
    assert not await owner.take(number, lease_s=60)
    with pytest.raises(OperationLostError):
        await owner.note(number, "more", lease_s=60)
    await other.apply([], action=replace(ACT, outcome="undone"), completes=number)
    with pytest.raises(OperationLostError):
        await owner.apply([Put(kind=Kind.TENANT, name="acme", body="1")], action=ACT, completes=number)
    assert await owner.document(Kind.TENANT, "acme") is None
    assert [each.action.outcome for each in await owner.audit(limit=10)] == ["undone"]
    assert list((await owner.pending()).operations) == []
    await owner.close()
    await other.close()


async def test_an_operation_excludes_others_until_it_ends_or_is_abandoned(opener: Opener) -> None:
    owner, other = opener(), opener()
    begun = replace(ACT, outcome="begun")
    number = await owner.begin(begun, lease_s=3600)
    with pytest.raises(OperationBusyError, match=f"has not ended .entry {number} of the audit log"):
        await other.begin(begun, lease_s=60, excludes=[ACT.action])
    assert len(await other.audit(limit=10)) == 1
    await owner.abandon(number, replace(ACT, outcome="rolled_back"))
    with pytest.raises(OperationLostError):
        await owner.abandon(number, ACT)
    [operation] = (await other.pending()).operations
    assert (operation.abandoned, operation.action.outcome) == (True, "rolled_back")
    assert operation.left_s < 0
    second = await other.begin(begun, lease_s=60, excludes=[ACT.action])
    await other.apply([], action=ACT, completes=second)
    await owner.begin(begun, lease_s=60, excludes=[ACT.action])
    await owner.close()
    await other.close()


async def test_each_note_and_each_takeover_gets_a_newer_fence_of_the_same_store(opener: Opener) -> None:
    owner, other = opener(), opener()
    first = (await owner.pending()).fence
    number = await owner.begin(replace(ACT, outcome="begun"), lease_s=3600)
    fences = [await owner.note(number, "what to undo", lease_s=3600) for _ in range(2)]
    assert first.number < fences[0].number
    assert fences[0].number + 1 < fences[1].number  # the one between is for the calls that undo the first
    await owner.hold([number], lease_s=-1)
    assert await owner.take(-1, lease_s=60) is None
    taken = await other.take(number, lease_s=60)
    assert taken is not None
    assert fences[1].number + 1 < taken.number
    assert await owner.take(number, lease_s=60) is None
    assert (await owner.pending()).fence == taken
    await other.advance(taken.number + 1000)
    after = (await owner.pending()).fence
    assert after.number > taken.number + 1000
    await owner.advance(1)
    second = await other.begin(replace(ACT, outcome="begun"), lease_s=3600)
    above = await other.note(second, "", lease_s=60, above=after.number + 1000)
    assert above.number > after.number + 1000
    assert {each.store for each in (first, *fences, taken, after, above)} == {first.store}
    await owner.close()
    await other.close()


async def test_two_stores_have_different_names(tmp_path: Path) -> None:
    stores = [open_sqlite(tmp_path / name) for name in ("one", "two", "one")]
    one, two, again = [(await each.pending()).fence.store for each in stores]
    assert one == again != two
    for each in stores:
        await each.close()


async def test_an_idempotency_key_is_remembered_once(store: Store) -> None:
    kept = Remembered(key="k", request="digest", status=201, body='{"a": 1}', etag='"1"')
    await store.apply([Put(kind=Kind.TENANT, name="acme", body="1")], action=ACT, remember=lambda _: kept)
    assert await store.remembered("k") == kept
    with pytest.raises(RepeatedKeyError):
        await store.apply([Put(kind=Kind.TENANT, name="acme", body="2")], action=ACT, remember=lambda _: kept)
    found = await store.document(Kind.TENANT, "acme")
    assert found is not None
    assert found.body == "1"


async def test_a_cancelled_change_is_whole_or_not_there(store: Store) -> None:
    task = asyncio.create_task(
        store.apply([Put(kind=Kind.TENANT, name=str(number), body="1") for number in range(20)], action=ACT)
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await store.documents(Kind.TENANT)) in {0, 20}


KILLED = """
import asyncio, sys, time
from pathlib import Path
from gateway.state import Action, Kind, Put, open_sqlite

async def write() -> None:
    if sys.argv[1].startswith("postgresql:"):
        from gateway.state.postgres import open_postgres
        store = open_postgres(sys.argv[1])
    else:
        store = open_sqlite(Path(sys.argv[1]))
    number = 0
    while True:
        number += 1
        both = [Put(kind=Kind.TENANT, name=str(number), body="1"), Put(kind=Kind.QUOTA, name=str(number), body="1")]
        await store.apply(both, action=Action(actor="a", action="put", target=str(number)))
        print(number, flush=True)

asyncio.run(write())
"""


async def test_what_was_answered_survives_a_kill_and_nothing_is_half_there(
    opener: Opener, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    where = str(tmp_path) if "sqlite" in request.node.name else request.getfixturevalue("postgres_url")
    opener_store = opener()
    writer = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, where, stdout=asyncio.subprocess.PIPE)
    assert writer.stdout is not None
    said = 0
    async with asyncio.timeout(60):
        while said < 15:
            said = int(await writer.stdout.readline())
    writer.kill()
    await writer.wait()
    try:
        tenants = {each.name for each in await opener_store.documents(Kind.TENANT)}
        assert {str(number) for number in range(1, said + 1)} <= tenants
        assert tenants == {each.name for each in await opener_store.documents(Kind.QUOTA)}
        assert tenants == {each.action.target for each in await opener_store.audit(limit=100_000)}
    finally:
        await opener_store.close()


SKEWED = """
import asyncio, sys, time
from pathlib import Path
from gateway.state import Action, Kind, Put, Remembered, open_sqlite

async def write() -> None:
    if sys.argv[1].startswith("postgresql:"):
        from gateway.state.postgres import open_postgres
        store = open_postgres(sys.argv[1])
    else:
        store = open_sqlite(Path(sys.argv[1]))
    kept = Remembered(key=sys.argv[2], request="r", status=200, body="{}")
    change = Put(kind=Kind.TENANT, name="harmless", body="{}")
    await store.apply([change], action=Action(actor="a", action="put", target="t"), remember=lambda _: kept)
    print((await store.read([Kind.TENANT], time.time)).skew_s)
    await store.close()

asyncio.run(write())
"""


@pytest.mark.parametrize("days", [400, -400])
async def test_a_gateway_whose_clock_is_wrong_does_not_erase_the_audit_log_and_what_was_remembered(
    opener: Opener, request: pytest.FixtureRequest, tmp_path: Path, days: int
) -> None:
    shared = "sqlite" not in request.node.name
    where = request.getfixturevalue("postgres_url") if shared else str(tmp_path)
    store = opener()
    for number in range(250):
        kept = Remembered(key=f"k{number}", request="r", status=200, body="{}")
        await store.apply([], action=replace(ACT, target=str(number)), remember=lambda _, kept=kept: kept)
    before = await store.audit(limit=1000)
    wrong = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SKEWED, where, "of-the-wrong-clock"),
        env=os.environ | skewed(days * 86_400.0),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await wrong.communicate()
    assert wrong.returncode == 0
    after = {each.number: each for each in await store.audit(limit=1000)}
    remembered = [await store.remembered(f"k{number}") for number in range(250)]
    if shared:
        assert abs(float(said) / 86_400 - days) < 1
        assert set(after) > {each.number for each in before}
        assert abs(after[max(after)].at_s - before[0].at_s) < 3600
        assert None not in remembered
    else:  # the file's clock is this host's: what one change removes is bounded
        assert len(after) >= 150
        assert sum(each is not None for each in remembered) >= 150
    await store.close()


async def test_a_store_that_lost_its_last_change_is_another_one_after_the_next(tmp_path: Path) -> None:
    """As a standby that took over without it."""
    store = open_sqlite(tmp_path)
    for name in ("kept", "lost"):
        await store.apply([Put(kind=Kind.KEY, name=name, body="{}")], action=ACT)
    before = await revision_of(store)
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("DELETE FROM kvgate_documents WHERE name = 'lost'")
        other.execute("UPDATE kvgate_revision SET revision = revision - 1")
    await store.apply([Put(kind=Kind.KEY, name="kept", body='{"revoked_at_s": 1}')], action=ACT)
    after = await revision_of(store)
    assert (after.number, after != before) == (before.number, True)
    await store.close()


async def test_a_damaged_file_is_unavailable_and_named(tmp_path: Path) -> None:
    store = open_sqlite(tmp_path)
    (tmp_path / "kvgate.sqlite3").write_bytes(b"not a database at all" * 400)
    for name in ("kvgate.sqlite3-wal", "kvgate.sqlite3-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(StoreUnavailableError, match="was overwritten while it was in use"):
        await revision_of(store)
    await store.close()
    with pytest.raises(StateError, match="not a database"):
        open_sqlite(tmp_path)
