"""``kvgate admin`` against a running gateway, as a person would type it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvgate.admin.anywhere import FLAGS, WITH_VALUE
from kvgate.admin.command import build_admin
from tests.support.command import typed
from tests.support.fleet import CHAT, COMPLETIONS, Fleet, chat, running_fleet
from tests.support.scripted_engine import MODEL


class Person:
    """Runs commands; the gateway's state folder has the key."""

    def __init__(self, fleet: Fleet, state_dir: Path) -> None:
        self.fleet = fleet
        self.given = ["--url", fleet.gateway.url, "--state-dir", str(state_dir)]

    async def types(self, *arguments: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
        code, out, err = await asyncio.to_thread(typed, "admin", *self.given, *options, *arguments)
        return code, out + err

    async def gets(self, *arguments: str) -> object:
        code, said = await self.types(*arguments, options=("--json",))
        assert code == 0, said
        return json.loads(said)


@pytest.fixture
async def person(tmp_path: Path) -> AsyncIterator[Person]:
    async with running_fleet(tmp_path) as fleet:
        yield Person(fleet, tmp_path)


async def test_a_tenant_gets_a_key_and_a_quota_and_loses_them(person: Person) -> None:
    assert (await person.types("tenants", "add", "acme", "--note", "first"))[0] == 0
    code, said = await person.types("tenants", "add", "acme")
    assert code == 1
    assert said.startswith("kvgate: tenant 'acme' exists\n")
    code, key = await person.types("keys", "add", "acme")
    assert code == 0
    key, _, told = key.partition("\n")
    assert told.startswith("This is the first key: from now on the gateway refuses requests without a known key")
    assert len((await person.types("keys", "add", "acme"))[1].splitlines()) == 1, "it is not the first one"
    headers = {"authorization": f"Bearer {key.strip()}"}
    async with person.fleet.gateway.post(CHAT, chat(), **headers) as answer:
        assert answer.status == 200
    assert (await person.types("quotas", "set", "acme", "--requests-per-min", "5", "--kv", "DDR=0:all"))[0] == 0
    quota = await person.gets("quotas", "set", "acme", "--priority", "high")
    assert isinstance(quota, dict)
    assert (quota["requests_per_min"], quota["priority"]) == (5, "high")
    assert quota["kv"] == {"DDR": {"guaranteed_bytes": 0, "burst_bytes": None, "weight": 1.0}}
    assert (await person.types("tenants", "suspend", "acme"))[0] == 0
    async with person.fleet.gateway.post(CHAT, chat(), **headers) as answer:
        assert answer.status == 403
    assert "acme" in (await person.types("tenants", "list"))[1]
    assert (await person.types("tenants", "remove", "acme"))[0] == 0
    async with person.fleet.gateway.post(CHAT, chat(), **headers) as answer:
        assert answer.status == 401
    assert "delete" in (await person.types("audit"))[1]


async def test_revoking_the_last_valid_key_tells_that_every_request_is_refused_now(person: Person) -> None:
    await person.types("tenants", "add", "acme")
    for _ in range(2):
        assert (await person.types("keys", "add", "acme"))[0] == 0
    listed = await person.gets("keys", "list")
    assert isinstance(listed, dict)
    first, last = (each["id"] for each in listed["data"])
    assert "No valid key is left" not in (await person.types("keys", "revoke", first))[1]
    code, said = await person.types("keys", "revoke", last)
    assert (code, said.splitlines()[-1][:23]) == (0, "No valid key is left: t")
    async with person.fleet.gateway.post(CHAT, chat()) as answer:
        assert answer.status == 401


async def test_tenants_and_keys_of_the_settings_are_listed_as_such(tmp_path: Path) -> None:
    keys = [{"key": "sk-of-settings-1", "tenant": "acme"}, {"key": "sk-of-settings-2", "tenant": "beta"}]
    async with running_fleet(tmp_path, api_keys=keys) as fleet:
        person = Person(fleet, tmp_path)
        assert "This is the first key" not in (await person.types("keys", "add", "acme"))[1]
        assert (await person.types("tenants", "add", "beta"))[0] == 0
        tenants = [line.split()[:2] for line in (await person.types("tenants", "list"))[1].splitlines()]
        assert tenants == [["id", "from"], ["beta", "store"], ["acme", "settings"]]
        rows = [line.split() for line in (await person.types("keys", "list"))[1].splitlines()]
        assert [row[1:3] for row in rows] == [
            *(["tenant", "from"], ["acme", "store"], ["acme", "settings"], ["beta", "settings"])
        ]
        of_one = await person.gets("keys", "list", "--tenant", "beta")
        assert of_one == {"object": "list", "data": [], "configured": ["beta"]}
        (made,) = [row[0] for row in rows if row[2] == "store"]
        assert "No valid key is left" not in (await person.types("keys", "revoke", made))[1]


async def test_the_options_of_admin_stand_before_or_after_its_commands(person: Person) -> None:
    url, folder = person.fleet.gateway.url, person.given[-1]
    for words in (
        ["--json", "--url", url, "--state-dir", folder, "tenants", "list"],
        ["tenants", "list", "--url", url, f"--state-dir={folder}", "--json"],
        ["tenants", "--url", url, "list", "--json", "--state-dir", folder],
    ):
        answer = await asyncio.to_thread(typed, "admin", *words)
        assert (answer.code, json.loads(answer.out)) == (0, {"object": "list", "data": [], "configured": []})


def test_no_command_of_admin_has_an_option_of_the_group() -> None:
    def options(command: Any) -> set[str]:
        own = {each for parameter in command.params for each in parameter.opts}
        return own.union(*map(options, getattr(command, "commands", {}).values()))

    group = get_command(build_admin())
    shared = {each for parameter in group.params for each in parameter.opts}
    assert shared >= WITH_VALUE | FLAGS
    assert not set().union(*map(options, group.commands.values())) & (WITH_VALUE | FLAGS)  # type: ignore[attr-defined]


async def test_the_fleet_is_told(person: Person) -> None:
    assert (await person.types("policies", "set", "eviction", "s3fifo", "--param", "small=0.1"))[0] == 0
    assert [each.policies["eviction"]["params"] for each in person.fleet.engines.values()] == [{"small": 0.1}] * 2
    assert "s3fifo" in (await person.types("policies", "list"))[1]
    assert (await person.types("policies", "shadow"))[0] == 0
    code, said = await person.types("presets", "apply", "long-context-32k", "cpu")
    assert code == 0
    assert "max_batch_size" in said
    assert "long-context-32k" in (await person.types("presets", "list"))[1]
    assert (await person.types("reset", "--instance", "b"))[0] == 0
    assert [each.resets for each in person.fleet.engines.values()] == [0, 1]


async def test_a_prefix_is_pinned_listed_unpinned_and_forgotten_by_its_hash(person: Person) -> None:
    async with person.fleet.gateway.post(COMPLETIONS, {"model": MODEL, "prompt": list(range(100))}) as answer:
        home = answer.headers["x-kvgate-instance"]
    await person.fleet.gateway.counted(f'kvgate_resident_blocks{{instance="{home}",tier="HBM"}}', 6)
    engine = person.fleet.engines[home]
    assert engine.cache is not None
    block = list(engine.cache.resident)[-1].hex()
    code, said = await person.types("prefixes", "pin", MODEL, "--block", block, "--ttl-s", "600", "--note", "ours")
    assert (code, list(engine.pins)) == (0, [block]), said
    pin = said.split()[1]
    said = (await person.types("prefixes", "list"))[1]
    assert all(part in said for part in (pin, home, "pinned", "ours", '{"HBM": 6}'))
    code, said = await person.types("prefixes", "unpin", pin)
    assert (code, engine.pins) == (0, {}), said
    code, said = await person.types("prefixes", "invalidate", MODEL, "--block", block)
    assert (code, len(engine.cache.resident)) == (0, 5), said
    assert '{"HBM": 1}' in said


async def test_a_preset_of_ones_own_begins_as_a_copy(person: Person, tmp_path: Path) -> None:
    code, form = await person.types("presets", "show", "long-context-32k")
    assert code == 0
    file = tmp_path / "ours.yaml"
    file.write_text(form.replace("max_batch_size: 8", "max_batch_size: 7"))
    assert (await person.types("presets", "put", "ours", str(file)))[0] == 0
    assert "max_batch_size: 7" in (await person.types("presets", "show", "ours"))[1]
    code, said = await person.types("presets", "put", "long-context-32k", str(file))
    assert code == 1
    assert "is shipped and can't be changed" in said
    assert (await person.types("presets", "remove", "ours"))[0] == 0
    file.write_text("- no preset")
    assert "the file contains no preset" in (await person.types("presets", "put", "ours", str(file)))[1]


async def test_what_is_refused_is_a_message(person: Person, tmp_path: Path) -> None:
    for arguments, options, part in (
        (("quotas", "set", "acme"), (), "no option sets a value"),
        (("quotas", "set", "acme", "--kv", "DDR"), (), "TIER=GUARANTEED:BURST"),
        (("quotas", "show", "nobody"), (), "no quota of its own"),
        (("prefixes", "pin", MODEL), (), "pass exactly one of --prompt, --messages and --block"),
        (("prefixes", "unpin", "nothing"), (), "unknown pin"),
        (("tenants", "list"), ("--admin-key", "wrong"), "not the admin key"),
        (("tenants", "list"), ("--url", "http://127.0.0.1:1"), "no gateway answers"),
        (("tenants", "list"), ("--state-dir", str(tmp_path / "none")), "no admin key"),
    ):
        code, said = await person.types(*arguments, options=options)
        assert code == 1
        assert part in said
        assert "Traceback" not in said


async def test_help_needs_neither_a_key_nor_a_gateway(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvgate", "admin", "--state-dir", str(tmp_path), "tenants", "--help"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, said
    assert b"suspend" in said
