"""SQLite on a disk that is full."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import StateError
from gateway.state import Action, Kind, Put, StoreUnavailableError
from gateway.state.sqlite import open_sqlite
from tests.support.small_disk import small_disk
from tests.support.stored_revision import revision_of

OPERATION = Action(actor="admin", action="put", target="tenant", outcome="done", detail="{}", request_id="")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as folder:
        yield folder


def fill(disk: Path) -> Path:
    file = disk / "other"
    with file.open("wb", buffering=0) as to:
        try:
            while True:
                to.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return file


async def test_on_a_full_disk_what_is_refused_was_not_done_what_was_done_stays_and_room_is_enough_to_go_on(
    disk: Path,
) -> None:
    store = open_sqlite(disk / "state")
    try:
        await store.apply([Put(kind=Kind.TENANT, name="before", body="{}")], action=OPERATION)
        other = fill(disk)
        kept, refused = {"before"}, 0
        for number in range(60):  # after a failure SQLite gives back the room of its log, so that a few still fit
            name = f"t{number}"
            try:
                await store.apply([Put(kind=Kind.TENANT, name=name, body='"' + "x" * 5_000 + '"')], action=OPERATION)
            except StoreUnavailableError as error:
                assert "full" in str(error)  # noqa: PT017 - that some of them fail is counted
                refused += 1
            else:
                kept.add(name)
        assert refused > 30
        assert {each.name for each in await store.documents(Kind.TENANT)} == kept
        assert len(await store.audit(limit=100)) == (await revision_of(store)).number == len(kept)
        other.unlink()
        await store.apply([Put(kind=Kind.TENANT, name="after", body="{}")], action=OPERATION)
    finally:
        await store.close()
    again = open_sqlite(disk / "state")
    try:
        assert {each.name for each in await again.documents(Kind.TENANT)} == {*kept, "after"}
    finally:
        await again.close()


async def test_a_store_that_can_not_be_opened_on_a_full_disk_names_the_disk_and_opens_once_there_is_room(
    disk: Path,
) -> None:
    store = open_sqlite(disk / "state")
    await store.apply([Put(kind=Kind.TENANT, name="before", body="{}")], action=OPERATION)
    await store.close()
    other = fill(disk)
    with pytest.raises(StateError, match=r"the disk of \S+/state is full .*: free at least 1 MiB there"):
        open_sqlite(disk / "state")
    other.unlink()
    again = open_sqlite(disk / "state")
    try:
        assert [each.name for each in await again.documents(Kind.TENANT)] == ["before"]
    finally:
        await again.close()
