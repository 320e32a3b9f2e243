"""A SQLite file that is replaced under a running gateway, and how a backup is restored."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.state.sqlite import FILE_NAME
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, chat, running_fleet
from tests.support.running_gateway import RunningGateway, eventually

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


@pytest.mark.parametrize("by", ["an older backup", "another store", "nothing", "no database"])
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
        match by:
            case "an older backup":
                shutil.copyfile(tmp_path / "copy", path)
            case "another store":
                of_another_store(path, tmp_path)
            case "nothing":
                path.write_bytes(b"")
            case _:
                path.write_bytes(b"no database" * 1000)
        status, _, said = await admin.call("PUT", "/tenants/other", {})
        assert (status, said["error"]["code"]) == (503, "store_unavailable")
        assert "was overwritten while it was in use: stop all gateways" in said["error"]["message"]

        async def named() -> bool:
            return [each["kind"] for each in (await admin.ok("GET", "/status"))["problems"]] == ["store"]

        await eventually(named)


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
    state_dir, copy = tmp_path / "state", tmp_path / "copy"
    async with running_fleet(state_dir, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = (await admin.ok("POST", "/keys", {"tenant": "acme"}))["key"]
        backup(state_dir, copy)
        await admin.ok("PUT", "/tenants/later", {})
    for name in (f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):
        (state_dir / name).unlink(missing_ok=True)
    shutil.copyfile(copy, state_dir / FILE_NAME)
    async with running_fleet(state_dir, **SETTINGS) as fleet:
        assert await status_with(fleet.gateway, key) == 200
        tenants = await Admin(fleet.gateway).ok("GET", "/tenants")
        assert [each["id"] for each in tenants["data"]] == ["acme"]
