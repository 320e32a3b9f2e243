"""``kvgate register`` and the fleet's part of ``kvgate admin`` against a gateway that runs here."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvgate.app import build_app
from tests.support.admin import ADMIN_KEY, Admin
from tests.support.command import typed
from tests.support.fleet import running_fleet
from tests.support.running_gateway import RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import MODEL, ScriptedEngine

KEY = "registration-key-0123456789"
LIMIT_S = 60.0


async def kvgate(*arguments: str) -> Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    environment |= {"KVGATE_REGISTRATION_KEY": KEY, "KVGATE_ADMIN_KEY": ADMIN_KEY, "COLUMNS": "200"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvgate", *arguments, env=environment, stdout=PIPE, stderr=STDOUT
    )


async def said(process: Process) -> tuple[int, str]:
    out, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode or 0, out.decode()


async def members(gateway: RunningGateway) -> list[str]:
    return [each["id"] for each in (await Admin(gateway).ok("GET", "/instances"))["data"]]


async def test_an_engine_is_registered_while_it_is_healthy_and_deregisters(tmp_path: Path) -> None:
    async with (
        ScriptedEngine().started() as engine,
        running_gateway(tmp_path, admin_key=ADMIN_KEY, registration_key=KEY) as gateway,
    ):
        process = await kvgate("register", "side", "--engine", engine.url, "--url", gateway.url, "--ttl", "1.5")
        try:
            await eventually(lambda: _are(gateway, ["side"]), LIMIT_S)
            await gateway.usable(1)
            engine.healthy = False
            await eventually(lambda: _are(gateway, []), LIMIT_S)
            engine.healthy = True
            await eventually(lambda: _are(gateway, ["side"]), LIMIT_S)
        finally:
            process.terminate()
        code, text = await said(process)
        assert code == 0
        assert "deregistered" in text
        assert "/health answered 503" in text
        assert KEY not in text
        assert await members(gateway) == []


async def _are(gateway: RunningGateway, expected: list[str]) -> bool:
    return await members(gateway) == expected


async def test_an_engine_that_is_refused_is_told_why_and_does_not_try_for_ever(tmp_path: Path) -> None:
    async with (
        ScriptedEngine().started() as engine,
        running_gateway(
            tmp_path, admin_key=ADMIN_KEY, registration_key=KEY, instance_networks=["10.0.0.0/8"]
        ) as gateway,
    ):
        code, text = await said(await kvgate("register", "side", "--url", engine.url, "--gateway", gateway.url))
        assert code == 1
        assert "is deprecated: use --engine for the engine and --url" in text
        assert "outside the allowed networks" in text
        code, text = await said(await kvgate("register", "side", "--engine", "engine", "--url", gateway.url))
        assert (code, "--engine engine is not the address of a server" in text) == (1, True)


def test_an_engine_to_register_is_needed() -> None:
    answer = typed("register", "side", "--key", KEY, KVGATE_URL="http://127.0.0.1:1")
    assert (answer.code, answer.err.splitlines()[0]) == (1, "kvgate: no engine is given")


async def test_the_fleet_is_managed_from_the_command_line(tmp_path: Path) -> None:
    async with (
        running_fleet(tmp_path, {"a": ScriptedEngine()}, admin_key=ADMIN_KEY) as fleet,
        ScriptedEngine().started() as b,
    ):

        async def admin(*arguments: str) -> Any:
            return json.loads(await printed("--json", *arguments))

        async def printed(*arguments: str) -> str:
            command = ["admin", "--url", fleet.gateway.url, "--admin-key", ADMIN_KEY, *arguments]
            done = await asyncio.to_thread(CliRunner().invoke, build_app(), command, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            return str(done.output)

        assert (await admin("instances", "add", "b", b.url))["id"] == "b"
        await fleet.gateway.usable(2)
        assert [each["id"] for each in (await admin("instances", "list"))["data"]] == ["a", "b"]
        assert (await admin("instances", "drain", "b"))["draining"]
        explained = await admin("explain", MODEL, "--prompt", "hello")
        assert (explained["instance"], explained["left_out"][0]["why"]) == ("a", "it is draining")
        assert not (await admin("instances", "resume", "b"))["draining"]
        assert (await admin("routing", "set", "round_robin"))["policy"] == "round_robin"
        assert (await admin("routing", "show"))["policy"] == "round_robin"
        assert await admin("routing", "reset") is None
        assert await admin("instances", "remove", "b") is None
        text = await printed("explain", MODEL, "--prompt", "hello")
        assert "* a" in text
        assert "cost_aware: a, no_tokenizer" in text
