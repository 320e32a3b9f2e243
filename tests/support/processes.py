"""Real kvgate processes for end-to-end tests: started as a user would, waited for, and gone at the end of the block."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx2
import psutil

from tests.support.warm_process import SPARE, Warm, WarmProcess

START_LIMIT_S = 240.0
STOP_LIMIT_S = 60.0
POLL_S = 0.1


class Running:
    """One ``kvgate ...`` command in a session of its own, its output in ``log``."""

    def __init__(self, process: subprocess.Popen[bytes] | WarmProcess, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def until_said(self, text: str) -> str:
        """Wait until its output has ``text``; fails when it ends or takes too long."""
        eventually(
            lambda: text in self.said or self.process.poll() is not None, START_LIMIT_S, f"{text!r} in the output"
        )
        assert text in self.said, f"it ended with {self.process.returncode}:\n{self.said}"
        return self.said

    def until_healthy(self, url: str) -> None:
        """Wait until ``url`` answers 200; fails when the process ends or takes too long."""
        eventually(lambda: answers(url) or self.process.poll() is not None, START_LIMIT_S, f"200 from {url}")
        assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.said}"

    def family(self) -> list[psutil.Process]:
        """It and all that it has started, directly or not."""
        me = psutil.Process(self.pid)
        return [me, *(each for each in me.children(recursive=True) if not _is_spare(each))]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        return self.process.wait(limit_s)


def _is_spare(process: psutil.Process) -> bool:
    """Whether it is a fork that has no work yet, and that a fresh start would not have."""
    try:
        return SPARE in process.cmdline()
    except psutil.Error:
        return False


def _fresh(
    module: str, arguments: Sequence[str], output: BinaryIO, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


@contextmanager
def running(
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    module: str = "kvgate",
    warm: int | None = None,
) -> Iterator[Running]:
    """Run ``python -m kvgate ARGUMENTS``; at the end nothing of it is left, whatever the test did.

    It and the first ``warm`` that it starts have their libraries imported already; without, it is a fresh start.
    """
    variables = {**os.environ, **environment}
    with log.open("ab") as output:
        process: subprocess.Popen[bytes] | WarmProcess
        if warm is not None:
            process = Warm.mine().start(
                module, arguments, environment=variables, output=output, spares=warm, new_session=True
            )
        else:
            process = _fresh(module, arguments, output, variables)
    started = Running(process, log)
    try:
        yield started
    finally:
        family = started.family() if process.poll() is None else []
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in family:
            if left.is_running():
                left.kill()


def answers(url: str) -> bool:
    """Whether ``url`` answers 200 now."""
    try:
        return httpx2.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


def eventually(condition: Callable[[], object], limit_s: float, what: str) -> None:
    """Ask until ``condition`` holds; fails naming ``what`` after ``limit_s``."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s:.0f} s: {what}"
        time.sleep(POLL_S)


def all_gone(processes: Sequence[psutil.Process]) -> bool:
    """Whether every one has ended (a zombie that nobody has collected yet has)."""
    return all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes)


def kill_now(pid: int) -> None:
    """SIGKILL one process, and it alone."""
    os.kill(pid, signal.SIGKILL)
