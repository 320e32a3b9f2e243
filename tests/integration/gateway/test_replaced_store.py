"""A SQLite file that is replaced under a running gateway, and how a backup is restored."""

import errno
import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.state.sqlite import FILE_NAME
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, chat, running_fleet
from tests.support.running_gateway import RunningGateway, eventually
from tests.support.small_disk import small_disk

SETTINGS: dict[str, Any] = {"admin_key": ADMIN_KEY, "salt_secret": "the same secret everywhere", "store_poll_s": 0.05}


async def status_with(gateway: RunningGateway, key: str) -> int:
    async with gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        await answer.read()
        return int(answer.status)


def backup(state_dir: Path, to: Path) -> None:
    """What the documentation says: ``sqlite3 kvgate.sqlite3 ".backup FILE"``."""
    with closing(sqlite3.connect(state_dir / FILE_NAME)) as store, closing(sqlite3.connect(to)) as copy:
        store.backup(copy)


@pytest.mark.parametrize("replaced", [True, False])
async def test_changes_do_not_go_into_a_file_that_nobody_finds_any_more(tmp_path: Path, *, replaced: bool) -> None:
    path = tmp_path / "state" / FILE_NAME
    async with running_fleet(path.parent, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
        backup(path.parent, tmp_path / "copy")
        if replaced:
            (tmp_path / "copy").replace(path)
        else:
            path.unlink()
        status, _, said = await admin.call("PUT", "/tenants/other", {})
        assert (status, said["error"]["code"]) == (503, "store_unavailable")
        assert "was replaced or removed while it was in use: stop all gateways" in said["error"]["message"]
        assert await status_with(fleet.gateway, key) == 200

        async def named() -> bool:
            return [each["kind"] for each in (await admin.ok("GET", "/status"))["problems"]] == ["store"]

        await eventually(named)
        assert path.exists() is replaced


def checkpointed(path: Path) -> None:
    """Make SQLite move its log into the file, as it does by itself every thousand pages."""
    with closing(sqlite3.connect(path)) as store:
        [[busy, *_]] = store.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
        assert not busy


def of_another_store(path: Path, folder: Path) -> None:
    """Write a store of the same age and more changes over the file."""
    backup(path.parent, folder / "other")
    with closing(sqlite3.connect(folder / "other")) as other, other:
        other.execute("UPDATE kvgate_audit SET at_s = at_s - 1")
        other.execute("UPDATE kvgate_revision SET revision = revision + 10")
    shutil.copyfile(folder / "other", path)


def overwrite(path: Path, by: str, older: Path) -> None:
    match by:
        case "an older backup":
            shutil.copyfile(older, path)
        case "another store":
            of_another_store(path, older.parent)
        case "nothing":
            path.write_bytes(b"")
        case _:
            path.write_bytes(b"no database" * 1000)


async def refused_as_overwritten(admin: Admin) -> None:
    status, _, said = await admin.call("PUT", "/tenants/other", {})
    assert (status, said["error"]["code"]) == (503, "store_unavailable")
    assert "was overwritten while it was in use: stop all gateways" in said["error"]["message"]

    async def named() -> bool:
        return [each["kind"] for each in (await admin.ok("GET", "/status"))["problems"]] == ["store"]

    await eventually(named)


OVERWRITTEN_BY = ["an older backup", "another store", "nothing", "no database"]


@pytest.mark.parametrize("by", OVERWRITTEN_BY)
async def test_changes_do_not_go_into_a_file_that_is_overwritten_in_place(tmp_path: Path, by: str) -> None:
    path = tmp_path / "state" / FILE_NAME
    async with running_fleet(path.parent, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        backup(path.parent, tmp_path / "copy")
        for number in range(5):
            await admin.ok("PUT", f"/tenants/t{number}", {})
            checkpointed(path)
        assert len((await admin.ok("GET", "/tenants"))["data"]) == 6
        overwrite(path, by, tmp_path / "copy")
        await refused_as_overwritten(admin)


@pytest.mark.parametrize("by", OVERWRITTEN_BY)
async def test_a_file_that_is_overwritten_below_a_log_of_changes_is_noticed_too(tmp_path: Path, by: str) -> None:
    path = tmp_path / "state" / FILE_NAME
    async with running_fleet(path.parent, **SETTINGS) as fleet:
        await Admin(fleet.gateway).ok("PUT", "/tenants/acme", {})
        backup(path.parent, tmp_path / "copy")
        await Admin(fleet.gateway).ok("PUT", "/tenants/later", {})
    async with running_fleet(path.parent, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        for number in range(5):
            await admin.ok("PUT", f"/tenants/t{number}", {})
        assert path.with_name(f"{FILE_NAME}-wal").stat().st_size
        overwrite(path, by, tmp_path / "copy")
        await refused_as_overwritten(admin)


def pages_of_the_log(log: Path) -> tuple[int, dict[int, bytes]]:
    """Return the size of a page, and the newest content of each page that is in the log."""
    data = log.read_bytes()
    [size] = struct.unpack(">I", data[8:12])
    pages = {}
    for at in range(32, len(data) - size - 23, 24 + size):
        if data[at + 8 : at + 16] != data[16:24]:
            break  # of an earlier log
        [number] = struct.unpack(">I", data[at : at + 4])
        pages[number] = data[at + 24 : at + 24 + size]
    return size, pages


def move_half_way(path: Path, count: int) -> None:
    """Leave what SQLite leaves when it is killed while it moves its log into the file: the number of frames to move in
    the index of the log, and pages in ascending order.
    """
    size, pages = pages_of_the_log(path.with_name(f"{path.name}-wal"))
    assert len(pages) > count
    with path.with_name(f"{path.name}-shm").open("r+b") as index:
        index.seek(16)
        frames = index.read(4)
        index.seek(128)
        index.write(frames)
    with path.open("r+b") as file:
        for number in sorted(pages)[:count]:
            file.seek((number - 1) * size)
            file.write(pages[number])


@pytest.mark.parametrize("count", range(1, 9))
async def test_a_file_into_which_the_log_was_moved_half_way_is_the_same(tmp_path: Path, count: int) -> None:
    path = tmp_path / "state" / FILE_NAME
    async with running_fleet(path.parent, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        for number in range(6):
            await admin.ok("PUT", f"/tenants/t{number}", {"note": "z" * 500})
        checkpointed(path)
        for number in range(6, 20):
            await admin.ok("PUT", f"/tenants/t{number}", {"note": "z" * 500})
        move_half_way(path, count)
        await admin.ok("PUT", "/tenants/after", {})
        assert len((await admin.ok("GET", "/tenants"))["data"]) == 21
        assert (await admin.ok("GET", "/status"))["problems"] == []


async def test_an_earlier_backup_over_the_file_is_noticed_though_all_later_changes_are_in_the_log(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state" / FILE_NAME
    async with running_fleet(path.parent, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        checkpointed(path)
        await admin.ok("PUT", "/tenants/saved", {})
        backup(path.parent, tmp_path / "copy")
        await admin.ok("PUT", "/tenants/later", {})
        shutil.copyfile(tmp_path / "copy", path)
        await refused_as_overwritten(admin)


async def test_a_file_that_only_got_another_time_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "state" / FILE_NAME
    async with running_fleet(path.parent, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        for number in range(4):
            await admin.ok("PUT", f"/tenants/t{number}", {})
            path.touch()
        assert len((await admin.ok("GET", "/tenants"))["data"]) == 4
        assert (await admin.ok("GET", "/status"))["problems"] == []


@pytest.mark.parametrize("noticed", ["by a change", "at the stop"])
@pytest.mark.parametrize("by", ["copy", "rename", *OVERWRITTEN_BY[1:]])
async def test_the_log_of_a_replaced_file_is_kept_and_does_not_get_into_the_new_one(
    tmp_path: Path, by: str, noticed: str
) -> None:
    path = tmp_path / "state" / FILE_NAME
    async with running_fleet(path.parent, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        checkpointed(path)
        backup(path.parent, tmp_path / "copy")
        await admin.ok("PUT", "/tenants/later", {})
        log = path.with_name(f"{FILE_NAME}-wal").read_bytes()
        if by == "copy":
            shutil.copyfile(tmp_path / "copy", path)
        elif by == "rename":
            (tmp_path / "copy").replace(path)
        else:
            overwrite(path, by, tmp_path / "copy")
        content = path.read_bytes()
        if noticed == "by a change":
            assert (await admin.call("PUT", "/tenants/other", {}))[0] == 503
    assert path.read_bytes() == content
    [kept] = path.parent.glob(f"{FILE_NAME}-wal*")
    assert kept.name.startswith(f"{FILE_NAME}-wal.replaced-")
    assert kept.read_bytes() == log
    if by in {"copy", "rename"}:  # the backup holds from the next start on
        async with running_fleet(path.parent, **SETTINGS) as fleet:
            found = await Admin(fleet.gateway).ok("GET", "/tenants")
            assert [each["id"] for each in found["data"]] == ["acme"]


def fill(disk: Path) -> Path:
    file = disk / "other"
    with file.open("ab", buffering=0) as to:
        try:
            while True:
                to.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return file


@pytest.mark.parametrize("by_others", [True, False])
async def test_a_store_on_a_disk_that_was_full_takes_changes_again_without_a_restart(
    tmp_path: Path, *, by_others: bool
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=2 << 20) as disk:
        async with running_fleet(disk / "state", **SETTINGS) as fleet:
            admin = Admin(fleet.gateway)
            await admin.ok("PUT", "/tenants/acme", {})
            key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
            other = fill(disk)
            made, reasons = {"acme"}, set()
            for number in range(40):
                status, _, said = await admin.call("PUT", f"/tenants/t{number}", {"note": "y" * 500})
                if status == 200:
                    made.add(f"t{number}")
                    continue
                reasons.add(said["error"]["message"])
                if by_others:
                    fill(disk)
            assert reasons
            assert all("full" in each for each in reasons), reasons
            other.unlink()
            await admin.ok("PUT", "/tenants/after", {})
            assert {each["id"] for each in (await admin.ok("GET", "/tenants"))["data"]} == {*made, "after"}
            assert await status_with(fleet.gateway, key) == 200


async def test_a_key_whose_revocation_a_full_disk_refused_is_accepted_until_a_revocation_succeeds(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=2 << 20) as disk:
        async with running_fleet(disk / "state", **SETTINGS) as fleet:
            admin = Admin(fleet.gateway)
            await admin.ok("PUT", "/tenants/acme", {})
            keys = [await admin.ok("POST", "/keys", {"tenant": "acme"}) for _ in range(8)]
            refused = []
            for each in keys:
                other = fill(disk)
                status, _, said = await admin.call("DELETE", f"/keys/{each['id']}")
                if status == 503:
                    assert said["error"]["code"] == "store_unavailable"
                    refused.append(each)
                assert await status_with(fleet.gateway, each["key"]) == (200 if status == 503 else 401)
            assert refused
            other.unlink()
            for each in refused:
                await admin.ok("DELETE", f"/keys/{each['id']}")
                assert await status_with(fleet.gateway, each["key"]) == 401


async def test_a_file_into_which_other_processes_move_the_log_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "state" / FILE_NAME
    async with running_fleet(path.parent, **SETTINGS, audit_entries=2) as fleet:
        admin = Admin(fleet.gateway)
        for number in range(12):
            await admin.ok("PUT", f"/tenants/t{number}", {})
            if number % 4 == 0:
                checkpointed(path)
        assert len((await admin.ok("GET", "/tenants"))["data"]) == 12
        assert (await admin.ok("GET", "/status"))["problems"] == []


async def test_a_backup_is_restored_as_the_documentation_says(tmp_path: Path) -> None:
    state_dir, copy, kept = tmp_path / "state", tmp_path / "copy", tmp_path / "kept"
    async with running_fleet(state_dir, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
        backup(state_dir, copy)
        await admin.ok("PUT", "/tenants/later", {})
    kept.mkdir()
    for file in state_dir.glob(f"{FILE_NAME}*"):
        file.rename(kept / file.name)
    shutil.copyfile(copy, state_dir / FILE_NAME)
    for folder, tenants in ((state_dir, ["acme"]), (kept, ["acme", "later"])):
        async with running_fleet(folder, **SETTINGS) as fleet:
            assert await status_with(fleet.gateway, key) == 200
            found = await Admin(fleet.gateway).ok("GET", "/tenants")
            assert [each["id"] for each in found["data"]] == tenants
