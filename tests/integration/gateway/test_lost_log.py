"""The log of a SQLite store, or its index, that is lost under a running gateway."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.state.sqlite import FILE_NAME
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, chat, running_fleet
from tests.support.running_gateway import RunningGateway, eventually

SETTINGS: dict[str, Any] = {"admin_key": ADMIN_KEY, "salt_secret": "the same secret everywhere", "store_poll_s": 0.05}
USE = """
import sqlite3, sys
store = sqlite3.connect(sys.argv[1])
store.execute("SELECT * FROM kvgate_revision").fetchall()
print("open", flush=True)
sys.stdin.read()
"""
LOG, INDEX = f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"


def lose(folder: Path, how: str) -> None:
    log = folder / LOG
    match how:
        case "the log is removed":
            log.unlink()
        case "the index is removed":
            (folder / INDEX).unlink()
        case "both are removed":
            log.unlink()
            (folder / INDEX).unlink()
        case "the log is moved":
            log.rename(folder / "old")
        case "the log is truncated":
            log.write_bytes(b"")
        case "the log is cut":
            with log.open("r+b") as file:
                file.truncate(log.stat().st_size - 1)
        case "a copy of the log takes its place":
            shutil.copyfile(log, folder / "copy")
            (folder / "copy").replace(log)
        case _:
            with log.open("r+b") as file:
                file.write(bytes(64))


NAME_LOST = [
    "the log is removed",
    "the index is removed",
    "both are removed",
    "the log is moved",
    "a copy of the log takes its place",
]
CONTENT_LOST = ["the log is truncated", "the log is cut", "the log is overwritten"]


async def refused(admin: Admin) -> None:
    status, _, said = await admin.call("PUT", "/tenants/other", {})
    assert (status, said["error"]["code"]) == (503, "store_unavailable")
    assert "lost its log while it was in use" in said["error"]["message"]

    async def named() -> bool:
        return [each["kind"] for each in (await admin.ok("GET", "/status"))["problems"]] == ["store"]

    await eventually(named)


async def status_with(gateway: RunningGateway, key: str) -> int:
    async with gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        await answer.read()
        return int(answer.status)


async def tenants(admin: Admin) -> Sequence[str]:
    return [each["id"] for each in (await admin.ok("GET", "/tenants"))["data"]]


@pytest.mark.parametrize("how", [*NAME_LOST, *CONTENT_LOST])
async def test_no_change_is_answered_200_after_the_log_is_lost(tmp_path: Path, how: str) -> None:
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = await admin.ok("POST", "/keys", {"tenant": "acme"})
        lose(tmp_path, how)
        assert (await admin.call("DELETE", f"/keys/{key['id']}"))[0] == 503
        await refused(admin)
        assert await status_with(fleet.gateway, key["key"]) == 200


@pytest.mark.parametrize("how", NAME_LOST)
async def test_the_last_gateway_that_stops_moves_a_log_without_a_name_into_the_file(tmp_path: Path, how: str) -> None:
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = await admin.ok("POST", "/keys", {"tenant": "acme"})
        await admin.ok("DELETE", f"/keys/{key['id']}")
        lose(tmp_path, how)
        await refused(admin)
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        assert await tenants(Admin(fleet.gateway)) == ["acme"]
        assert await status_with(fleet.gateway, key["key"]) == 401


@contextmanager
def used_by_another_process(path: Path) -> Iterator[None]:
    """A process that has opened the store, and that is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", USE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        try:
            assert user.stdout is not None
            assert user.stdout.readline() == b"open\n"
            yield
        finally:
            user.kill()


async def test_a_log_without_a_name_that_can_not_be_moved_is_copied_and_has_all_changes(tmp_path: Path) -> None:
    folder, apart = tmp_path / "state", tmp_path / "apart"
    async with running_fleet(folder, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        with used_by_another_process(folder / FILE_NAME):
            lose(folder, "both are removed")
            await refused(admin)
    [kept] = folder.glob(f"{LOG}.replaced-*")
    assert kept.stat().st_mode & 0o777 == 0o600
    apart.mkdir()
    shutil.copyfile(folder / FILE_NAME, apart / FILE_NAME)
    shutil.copyfile(kept, apart / LOG)
    for state_dir, found in ((folder, []), (apart, ["acme"])):
        async with running_fleet(state_dir, **SETTINGS) as fleet:
            assert await tenants(Admin(fleet.gateway)) == found


async def test_a_log_that_was_cut_does_not_get_into_the_file(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        content = (tmp_path / FILE_NAME).read_bytes()
        lose(tmp_path, "the log is truncated")
        await refused(admin)
        assert (tmp_path / FILE_NAME).read_bytes() == content


@pytest.mark.parametrize("mode", ["PASSIVE", "FULL", "RESTART", "TRUNCATE"])
async def test_a_log_that_sqlite_moves_begins_again_or_empties_is_not_lost(tmp_path: Path, mode: str) -> None:
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        for number in range(8):
            await admin.ok("PUT", f"/tenants/t{number}", {})
            with closing(sqlite3.connect(tmp_path / FILE_NAME)) as store:
                store.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
                with store:
                    store.execute("UPDATE kvgate_revision SET revision = revision + 1")
        assert len(await tenants(admin)) == 8
        assert (await admin.ok("GET", "/status"))["problems"] == []
