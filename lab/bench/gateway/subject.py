"""A gateway under measurement: ours or a peer's, as a process whose processor time is read from outside."""

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvgate.host.ports import free_ports
from lab.bench.gateway.backend import MODEL
from lab.bench.timed_chat import BenchmarkError

_READY_S = 120.0
_STOP_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A gateway to be measured beside ours: its name and its command, with ``{port}`` and the backends' ports ``{a}``,
    ``{b}``, ``{c}`` and ``{d}`` in it.
    """

    name: str
    command: str


@dataclass(frozen=True, slots=True)
class Subject:
    """Where it listens, and its process."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Return the processor time of the process and its children so far."""
        total = 0.0
        for each in [self.process, *self.process.children(recursive=True)]:
            try:
                times = each.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def rss_mib(self) -> float:
        """Return the memory of the process and its children."""
        family = [self.process, *self.process.children(recursive=True)]
        return float(sum(each.memory_info().rss for each in family)) / (1 << 20)


@contextmanager
def ours(folder: Path, backends: Sequence[int], settings: Mapping[str, str]) -> Iterator[Subject]:
    """Run our gateway in front of these ports."""
    port = free_ports(1)[0]
    mine = {
        "KVGATE_PORT": str(port),
        "KVGATE_INSTANCES": json.dumps([{"id": f"b{each}", "url": f"http://127.0.0.1:{each}"} for each in backends]),
        "KVGATE_STATE_DIR": str(folder / "state"),
        "KVGATE_LOG_LEVEL": "warning",
        **{f"KVGATE_{name.upper()}": value for name, value in settings.items()},
    }
    others = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    with _running([sys.executable, "-m", "gateway"], others | mine, folder / "gateway.log", port) as subject:
        yield subject


@contextmanager
def peer(folder: Path, backends: Sequence[int], said: Peer) -> Iterator[Subject]:
    """Run a peer's command in front of these ports."""
    port = free_ports(1)[0]
    try:
        command = shlex.split(said.command.format(port=port, **dict(zip("abcd", backends, strict=True))))
    except (KeyError, IndexError, ValueError) as error:
        raise BenchmarkError(f"peer {said.name}: the command can't be read: {error}") from error
    with _running(command, dict(os.environ), folder / f"{said.name}.log", port) as subject:
        yield subject


@contextmanager
def _running(command: list[str], environment: Mapping[str, str], log: Path, port: int) -> Iterator[Subject]:
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise BenchmarkError(f"{command[0]} can't be started: {error.strerror}") from error
    family = psutil.Process(process.pid)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, url, log)
        yield Subject(url, family)
    finally:
        started = [family, *family.children(recursive=True)] if process.poll() is None else []
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for each in started:
            if each.is_running():
                each.kill()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    last = "nothing was tried"
    ends_s = time.monotonic() + _READY_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            raise BenchmarkError(f"it ended with {process.returncode}: {log.read_text(errors='replace')[-400:]}")
        request = urllib.request.Request(  # noqa: S310 - our own loopback address
            f"{url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        )
        try:
            with opener.open(request, timeout=5) as answer:
                if answer.status == 200:  # noqa: PLR2004 - the one status that says it works
                    return
        except (urllib.error.URLError, OSError) as error:
            last = str(error)
            time.sleep(0.2)
    raise BenchmarkError(
        f"no answer through {url} in {_READY_S:.0f} s ({last}): {log.read_text(errors='replace')[-400:]}"
    )
