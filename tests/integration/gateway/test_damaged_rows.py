"""Rows of a SQLite store that are damaged: each fails alone."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.state import Kind
from gateway.state.sqlite import FILE_NAME
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.fleet import CHAT, chat, running_fleet
from tests.support.running_gateway import RunningGateway, eventually

SETTINGS: dict[str, Any] = {"admin_key": ADMIN_KEY, "salt_secret": "the same secret everywhere", "store_poll_s": 0.05}
NO_TEXT = {
    "a body that is not UTF-8": ("'bad'", "CAST(x'fffe7b' AS TEXT)", "bad"),
    "a body with one byte that is not UTF-8": (
        "'bad'",
        """CAST(CAST('{"note": "' AS BLOB) || x'ff' || CAST('"}' AS BLOB) AS TEXT)""",
        "bad",
    ),
    "a name that is not UTF-8": ("CAST(x'eda080' AS TEXT)", "'{}'", r"not UTF-8 text: \xed\xa0\x80"),
    "a body of bytes": ("'bad'", "x'7b7d'", "bad"),
    "a name of bytes": ("x'61636d65'", "'{}'", "not UTF-8 text: acme"),
}


async def status_with(gateway: RunningGateway, key: str) -> int:
    async with gateway.post(CHAT, chat(), authorization=f"Bearer {key}") as answer:
        await answer.read()
        return int(answer.status)


def write(state_dir: Path, *statements: str) -> None:
    with closing(sqlite3.connect(state_dir / FILE_NAME, timeout=30)) as store, store:
        for each in statements:
            store.execute(each)
        store.execute("UPDATE kvgate_revision SET revision = revision + 1")


def document(kind: Kind, name: str, body: str) -> str:
    return f"INSERT INTO kvgate_documents VALUES ('{kind}', {name}, {body}, 1, 1, 1)"  # noqa: S608 - expressions of SQL


@pytest.mark.parametrize("kind", [each for each in Kind if each is not Kind.WORKLOAD])
@pytest.mark.parametrize("how", NO_TEXT)
async def test_a_document_that_is_not_text_fails_alone(tmp_path: Path, kind: Kind, how: str) -> None:
    name, body, subject = NO_TEXT[how]
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = await admin.ok("POST", "/keys", {"tenant": "acme"})
        write(tmp_path, document(kind, name, body))

        async def named() -> bool:
            found = [(each["kind"], each["subject"]) for each in (await admin.ok("GET", "/status"))["problems"]]
            return found == [("document", f"{kind}/{subject}")]

        await eventually(named)
        assert await status_with(fleet.gateway, key["key"]) == 200
        assert [each["id"] for each in (await admin.ok("GET", "/tenants"))["data"]] == ["acme"]
        for path in ("/keys", "/quotas", "/policies", "/instances", "/prefixes", "/presets"):
            await admin.ok("GET", path)
        status, headers, _ = await admin.call("DELETE", f"/keys/{key['id']}")
        assert (status, headers.get("x-kvgate-in-force")) == (200, None)
        assert await status_with(fleet.gateway, key["key"]) == 401


async def test_an_entry_of_the_audit_log_that_is_damaged_is_shown_beside_all_others(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, **SETTINGS) as fleet:
        admin = Admin(fleet.gateway)
        for name in ("a", "b", "c", "d"):
            await admin.ok("PUT", f"/tenants/{name}", {})
        write(
            tmp_path,
            "UPDATE kvgate_audit SET detail = CAST(x'ff' AS TEXT), actor = CAST(x'fe' AS TEXT) WHERE number = 1",
            "UPDATE kvgate_audit SET detail = '[' WHERE number = 2",
            "UPDATE kvgate_audit SET detail = '7' WHERE number = 3",
        )
        found = (await admin.ok("GET", "/audit"))["data"]
        assert [each["detail"].get("unreadable") for each in found] == [None, "7", "[", r"not UTF-8 text: \xff"]
        assert found[-1]["actor"] == r"not UTF-8 text: \xfe"


async def test_a_revocation_that_is_stored_while_the_store_can_not_be_read_has_the_header(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    async with running_fleet(tmp_path, **SETTINGS | {"store_poll_s": 3600.0}) as fleet:
        admin = Admin(fleet.gateway)
        await admin.ok("PUT", "/tenants/acme", {})
        key = await admin.ok("POST", "/keys", {"tenant": "acme"})
        write(tmp_path, *(document(Kind.PIN, f"'{n}'", f"'{str(n) * 3000}'") for n in range(3)))
        with closing(sqlite3.connect(path)) as store:
            store.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            [[size]] = store.execute("PRAGMA page_size").fetchall()
        at = path.read_bytes().index(b"1" * 3000) // size * size
        with path.open("r+b") as file:  # the page of one document, which only a reader of all needs
            file.seek(at)
            page = file.read(size)
            file.seek(at)
            file.write(bytes(size))
        status, headers, _ = await admin.call("DELETE", f"/keys/{key['id']}")
        assert (status, headers.get("x-kvgate-in-force")) == (200, "later")
        assert await status_with(fleet.gateway, key["key"]) == 200
        with path.open("r+b") as file:
            file.seek(at)
            file.write(page)
        status, headers, _ = await admin.call("PUT", "/tenants/other", {})
        assert (status, headers.get("x-kvgate-in-force")) == (200, None)
        assert await status_with(fleet.gateway, key["key"]) == 401
