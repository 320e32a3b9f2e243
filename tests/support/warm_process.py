"""Python processes that begin with their libraries imported: forked from one that has imported them, and else fresh.

An LMDeploy instance is two processes that each import torch and transformers for many seconds before anything of ours
happens. ``start`` runs a module as ``python -m`` would, in a fork of a process that has imported those libraries and
nothing of LMDeploy or kvgate; the process that ``multiprocessing`` then spawns for the engine is a fork of it as well.
Everything else is as in a fresh process: environment, output, process tree, ends and signals. What a fresh start
itself does is proven by the tests that ask for one.
"""

import atexit
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any, BinaryIO, Self

LIBRARIES = (
    "torch",
    "torch.distributed.tensor",
    "torch.export",
    "transformers",
    "transformers.activations",
    "transformers.image_processing_utils",
    "accelerate",
    "aiohttp",
    "fastapi",
    "httpx2",
    "jinja2",
    "mmengine",
    "openai.types.responses",
    "opentelemetry",
    "prometheus_client",
    "psutil",
    "pydantic_settings",
    "requests",
    "sympy",
    "uvicorn",
    "xgrammar",
    "zmq.asyncio",
)
"""What every instance imports, wherever it comes from."""
READY_WITHIN_S = 240.0
_MOST_BYTES = 1 << 20
_ABOVE = 64
"""File descriptors are put aside here while they are moved to their places."""


class WarmProcess:
    """A process that was forked for us: of ``subprocess.Popen`` what tests use."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._link = link

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._link], [], [], timeout)[0]:
            self.returncode = int(self._link.recv(64) or b"-9")
            self._link.close()
        return self.returncode


class Warm:
    """The process with the libraries, and the connection over which it is told what to fork."""

    _mine: "Warm | None" = None

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self._link = ours
        self._lock = threading.Lock()
        atexit.register(self.close)

    @classmethod
    def mine(cls) -> Self:
        """Return this process's, started by the first who asks."""
        if Warm._mine is None:
            Warm._mine = cls()
        return Warm._mine  # type: ignore[return-value]

    def close(self) -> None:
        self._link.close()  # it ends when nobody can ask any more
        self._process.wait(30)

    def start(
        self, module: str, arguments: Sequence[str], *, environment: Mapping[str, str], output: BinaryIO
    ) -> WarmProcess:
        """Run a module as the main one; its output and errors go to ``output``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
        }
        with self._lock, theirs:
            _send(self._link, order, [output.fileno(), theirs.fileno()])
        assert select.select([ours], [], [], READY_WITHIN_S)[0], "the warm process does not answer"
        return WarmProcess(int(ours.recv(64)), ours)


def _send(link: socket.socket, order: Any, files: Sequence[int]) -> None:
    link.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))])


def _receive(link: socket.socket) -> tuple[Any, list[int]]:
    """Return an order and its files, or None when nobody is there who could give one."""
    data, files, _, _ = socket.recv_fds(link, _MOST_BYTES, 16)
    return (json.loads(data) if data else None), files


def _serve(link: socket.socket) -> dict[str, Any] | None:
    """Fork for each order. Returns in the child, with the order, or when there will be no more."""
    children: dict[int, socket.socket] = {}
    woken, wake = socket.socketpair()
    wake.settimeout(0.0)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([link, woken], [], [])
        if woken in readable:
            woken.recv(4096)
            for pid in list(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    with children.pop(pid) as asker:
                        asker.send(str(os.waitstatus_to_exitcode(status)).encode())
        if link not in readable:
            continue
        order, files = _receive(link)
        if order is None:
            return None
        output, asker_file = files
        asker = socket.socket(fileno=asker_file)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (link, woken, wake, asker, *children.values()):
                each.close()
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)
            return dict(order)
        os.close(output)
        children[pid] = asker
        asker.send(str(pid).encode())


def _become(order: dict[str, Any]) -> None:
    """Be the process that was asked for, up to its end."""
    _settle(order["environment"])
    os.chdir(order["folder"])
    _fork_the_next_spawned()
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _settle(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    import numpy as np

    np.random.seed()  # noqa: NPY002 - what libraries that ask for no generator of their own use


def _fork_the_next_spawned() -> None:
    """Fork what ``multiprocessing`` will spawn now, while nothing has happened here; it waits for its work."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        order, files = _receive(theirs)
        if order is None:
            os._exit(0)
        theirs.close()
        _put(files, order["files"])
        _settle(order["environment"])
        sys.argv = ["-c", *order["arguments"]]
        exec(order["code"], {"__name__": "__main__"})  # noqa: S102 - multiprocessing's own words
        sys.exit()
    theirs.close()
    spawn = util.spawnv_passfds  # type: ignore[attr-defined]

    def spawnv_passfds(path: bytes, arguments: Sequence[str], passfds: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in arguments:  # its resource tracker
            return int(spawn(path, arguments, passfds))
        util.spawnv_passfds = spawn  # type: ignore[attr-defined]  # any further one is a fresh process
        place = list(arguments).index("-c")
        order = {
            "code": arguments[place + 1],
            "arguments": list(arguments[place + 2 :]),
            "files": list(passfds),
            "environment": dict(os.environ),
        }
        with ours:
            _send(ours, order, passfds)
        return pid

    util.spawnv_passfds = spawnv_passfds  # type: ignore[attr-defined]


def _put(files: Sequence[int], places: Sequence[int]) -> None:
    """Give files the numbers that they have in the process that passed them on."""
    import fcntl

    aside = [fcntl.fcntl(each, fcntl.F_DUPFD, max(_ABOVE, *places) + 1) for each in files]
    for each in files:
        os.close(each)
    for file, place in zip(aside, places, strict=True):
        os.dup2(file, place)
        os.close(file)


def _main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    for name in LIBRARIES:
        import_module(name)
    assert threading.active_count() == 1, "a library has started a thread, which a fork would lack"
    order = _serve(link)
    if order is not None:
        _become(order)


if __name__ == "__main__":
    _main()
