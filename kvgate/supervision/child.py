"""One supervised process: started in its own session, its output in a log file, stopped with all that it started.

It is born waiting: a shell that reads one line and then becomes the command. A supervisor first tells its watchdog of
the process and then lets it go, so that a supervisor killed at any moment leaves nothing behind: either the watchdog
knows the process, or the line never comes and the shell ends.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvgate.failure import CommandError
from kvgate.supervision.watchdog import signal_group

TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
GATE = ("/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "gate")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to start. It is ready when ``ready_url`` answers 200, which may take ``start_limit_s``. From then on it
    answers 200 at ``alive_url``; one that never does in ``silent_tries`` tries is stuck. None asks nothing.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready_url: str
    start_limit_s: float = 600.0
    alive_url: str | None = None
    silent_tries: int = 24


class ChildFailedError(CommandError):
    """A child ended that should have gone on, or never became ready; the message has the end of its log."""

    def __init__(self, child: str, what: str, log: Path) -> None:
        self.child = child
        self.what = what
        self.log = log
        lines = last_lines(log)
        shown = "".join(f"\n    {line}" for line in lines) if lines else " nothing"
        super().__init__(f"{child} {what}. Its last log lines:{shown}", f"full log: {log}")


class Child:
    """A running process of a ``ChildSpec``. It leads a session: a terminal's Ctrl-C reaches only the supervisor."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log: Path) -> None:
        self.spec = spec
        self.log = log
        self._process = process

    @classmethod
    async def start(cls, spec: ChildSpec, folder: Path) -> "Child":
        """Start it, waiting to be let go, its output appended to ``folder/NAME.log``.

        Raises ``CommandError`` when there is no such program or it can't be started.
        """
        log = folder / f"{spec.name}.log"
        program = spec.command[0]
        if shutil.which(program, path=spec.environment.get("PATH", os.defpath)) is None:
            raise CommandError(f"cannot start {spec.name}: {program} is missing or not executable")
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *GATE,
                    *spec.command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env=dict(spec.environment),
                    start_new_session=True,
                )
        except OSError as error:
            raise CommandError(f"cannot start {spec.name} ({program}): {error.strerror}") from error
        return cls(spec, process, log)

    async def let_go(self) -> None:
        """Let it become its command. One that has ended meanwhile is told by ``wait``."""
        gate = self._process.stdin
        if gate is not None:
            with contextlib.suppress(ConnectionError):
                gate.write(b"go\n")
                await gate.drain()
            gate.close()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    async def wait(self) -> int:
        """Return its exit code, negative for a signal, when it ends."""
        return await self._process.wait()

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, and SIGKILL for it and all that it started after ``grace_s``; nothing of its group is left then."""
        if self.is_running:
            signal_group(self.pid, signal.SIGTERM)
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                pass  # the SIGKILL below is for this
        signal_group(self.pid, signal.SIGKILL)
        await self._process.wait()

    def failure(self) -> ChildFailedError:
        """Describe its unexpected end."""
        return ChildFailedError(self.name, describe_exit(self._process.returncode), self.log)


def describe_exit(code: int | None) -> str:
    """Say in words what an exit code means; None for a process that is still running."""
    if code is None:
        return "is running"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with exit code {code}"


def last_lines(log: Path, count: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a log without colours and blank lines; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [_ANSI.sub("", line).rstrip() for line in text.replace("\r", "\n").splitlines()]
    return [line for line in lines if line][-count:]
