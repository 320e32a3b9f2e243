"""``kvgate top`` against a running gateway, in a terminal of 80x24."""

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import pytest

from kvcontrol.core import CacheTier
from kvcontrol.core.control import TierStats
from kvgate.host.ports import free_ports
from tests.support.admin import ADMIN_KEY
from tests.support.fleet import CHAT, Fleet, chat, running_fleet
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import ScriptedEngine

DEADLINE_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24, **environment: str) -> None:
        self._arguments = (sys.executable, "-m", "kvgate", "top", *arguments)
        self._environment = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"} | environment
        for name in ("COLUMNS", "LINES", "NO_COLOR", "KVGATE_ADMIN_KEY"):
            self._environment.pop(name, None)
        self._size = (width, height)
        self.said = ""

    async def __aenter__(self) -> Self:
        self._number, other = pty.openpty()
        self.resize(*self._size, send=False)
        self.process = await asyncio.create_subprocess_exec(
            *self._arguments, stdin=other, stdout=other, stderr=other, env=self._environment, start_new_session=True
        )
        os.close(other)
        asyncio.get_running_loop().add_reader(self._number, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._number)
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        os.close(self._number)

    def _read(self) -> None:
        try:
            self.said += os.read(self._number, 65_536).decode("utf-8", "replace")
        except OSError:  # the process has ended
            asyncio.get_running_loop().remove_reader(self._number)

    def type(self, keys: str) -> None:
        os.write(self._number, keys.encode())

    def resize(self, width: int, height: int, *, send: bool = True) -> None:
        fcntl.ioctl(self._number, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        if send:
            self.process.send_signal(signal.SIGWINCH)

    @property
    def picture(self) -> list[str]:
        """The lines of the latest whole picture."""
        return [each.rstrip() for each in ESCAPES.sub("", self.said.rpartition("\x1b[H")[2]).splitlines()]

    async def shows(self, text: str) -> None:
        try:
            await eventually(lambda: text in "\n".join(self.picture), DEADLINE_S)
        except TimeoutError:
            raise AssertionError(f"{text!r} is not shown:\n{self.said}") from None

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    for each in engines.values():
        each.tiers = {CacheTier.HBM: TierStats(capacity_blocks=100, used_blocks=60, cached_blocks=40, block_bytes=4096)}
    async with running_fleet(tmp_path, engines, admin_key=ADMIN_KEY) as running:
        async with running.gateway.post(CHAT, chat(stream=True)) as answer:
            await answer.read()
        yield running


async def test_it_fits_80_by_24_follows_the_window_and_q_quits(fleet: Fleet) -> None:
    async with Terminal("--url", fleet.gateway.url, "--admin-key", ADMIN_KEY) as terminal:
        await terminal.shows("q quits")
        said = terminal.picture
        assert len(said) <= 24
        assert max(map(len, said)) <= 80
        assert "2 of 2 usable" in said[0]
        assert any(each.startswith("a ") and "healthy" in each and "60%" in each for each in said)
        assert any(each.startswith("eviction lru") for each in said)
        fleet.engines["b"].healthy = False
        await terminal.shows("1 of 2 usable")
        terminal.resize(60, 14)
        await eventually(lambda: "q quits" in terminal.picture and max(map(len, terminal.picture)) <= 60, DEADLINE_S)
        assert len(terminal.picture) <= 14
        terminal.type("x")
        assert terminal.process.returncode is None, "any other key does nothing"
        terminal.type("q")
        assert await terminal.ended() == 0
        assert "\x1b[?1049l" in terminal.said, "the screen is as it was before"


async def test_over_a_line_that_knows_only_ascii_it_draws_with_ascii(fleet: Fleet) -> None:
    async with Terminal(
        "--url", fleet.gateway.url, "--admin-key", ADMIN_KEY, LC_ALL="C", PYTHONIOENCODING="", PYTHONUTF8=""
    ) as terminal:
        await terminal.shows("q quits")
        assert terminal.said.isascii()
        terminal.process.send_signal(signal.SIGINT)
        assert await terminal.ended() == 130
        assert "\x1b[?1049l" in terminal.said, "the screen is as it was before after Ctrl-C, too"


async def test_a_terminal_that_cannot_redraw_is_told_what_it_can_have(fleet: Fleet) -> None:
    async with Terminal("--url", fleet.gateway.url, "--admin-key", ADMIN_KEY, TERM="dumb") as terminal:
        assert await terminal.ended() == 1
        assert "TERM=dumb" in terminal.said
        assert "--once" in terminal.said


async def run(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvgate", "top", *arguments),
        env={**os.environ, "COLUMNS": "80"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    return process.returncode or 0, said.decode()


async def test_scripts_get_one_picture_or_one_object_and_failures_are_said(fleet: Fleet) -> None:
    here = ("--url", fleet.gateway.url, "--admin-key")
    code, said = await run(*here, ADMIN_KEY, "--json")
    assert code == 0, said
    found = json.loads(said)
    assert [each["id"] for each in found["status"]["instances"]] == ["a", "b"]
    assert found["shadows"]["instances"]["a"]["in_charge"] == "lru"
    code, said = await run(*here, ADMIN_KEY, "--once")
    assert code == 0, said
    assert max(map(len, said.splitlines())) <= 80
    assert "2 of 2 usable" in said
    code, said = await run(*here, "another-key-0123456789", "--once")
    assert (code, "this is not the admin key" in said) == (1, True)
    code, said = await run("--url", f"http://127.0.0.1:{free_ports(1)[0]}", "--admin-key", ADMIN_KEY, "--once")
    assert (code, "no gateway answers at" in said) == (1, True)
    code, said = await run(*here, ADMIN_KEY)
    assert (code, "needs a terminal" in said) == (1, True)
