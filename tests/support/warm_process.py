"""Python processes that begin with their libraries imported: forked from one that has imported them, and else fresh.

An LMDeploy instance is two processes that each import torch and transformers for many seconds before anything of ours
happens. ``start`` runs a module as ``python -m`` would, in a fork of a process that has imported those libraries and
nothing of kvgate. The process that ``multiprocessing`` then spawns for the engine is a fork as well, and so
are the first ``python -m`` processes that a module starts, as many as it has spares.
Everything else is as in a fresh process: environment, command line, output, process tree, ends and signals. What a
fresh start itself does is proven by the tests that ask for one.
"""

import atexit
import ctypes
import gc
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
from typing import Any, BinaryIO, ClassVar, Self

LIBRARIES = (
    "torch",
    "torch.distributed.tensor",
    "torch.export",
    "transformers",
    "transformers.activations",
    "transformers.image_processing_utils",
    "transformers.models.auto.processing_auto",
    "accelerate",
    "aiohttp",
    "dns.asyncresolver",
    "fastapi",
    "fastapi.middleware.cors",
    "httpx2",
    "jinja2",
    "mmengine",
    "mmengine.dist",
    "msgspec",
    "multiprocessing.managers",
    "openai.types.responses",
    "openai_harmony",
    "opentelemetry",
    "prometheus_client",
    "psutil",
    "pydantic.v1",
    "pydantic_settings",
    "requests",
    "rich.progress",
    "sympy",
    "typer",
    "uvicorn",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvloop",
    "xgrammar",
    "xxhash",
    "yaml",
    "zmq.asyncio",
    "lmdeploy.cli.entrypoint",
    "lmdeploy.pytorch.configurations",
    "lmdeploy.pytorch.engine.mp_engine.zmq_engine",
    "lmdeploy.pytorch.engine.model_agent",
    "lmdeploy.pytorch.models.llama",
    "lmdeploy.pytorch.strategies.ar",
    "lmdeploy.serve.openai.api_server",
    "lmdeploy.serve.parsers",
    "lmdeploy.vl.engine",
)
"""What every instance imports, wherever it comes from: LMDeploy's modules last, as nothing of ours has changed them."""
READY_WITHIN_S = 240.0
SPARE = "spare"
"""In the command line of a fork that waits for its work."""
_MOST_BYTES = 1 << 20
_ROOM = 1 << 13
"""Bytes that a command line may take."""
_ABOVE = 64
"""File descriptors are put aside here while they are moved to their places."""


_NAME = __spec__.name if __spec__ else __name__


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
                [sys.executable, "-m", _NAME, str(theirs.fileno()), "-" * _ROOM],
                stdin=subprocess.DEVNULL,
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

    def start(  # noqa: PLR0913 - what a process is started with
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: BinaryIO,
        spares: int = 0,
        new_session: bool = False,
    ) -> WarmProcess:
        """Run a module as the main one; its output and errors go to ``output``.

        So many ``spares`` are forked for what it starts with ``python -m``; what it starts beyond them is fresh.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
            "spares": spares,
            "new_session": new_session,
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
    if order["new_session"]:
        os.setsid()
    _entitle(sys.executable, "-m", order["module"], *order["arguments"])
    _fork_the_next_spawned()
    if order["spares"]:
        _fork_the_next_started(order["spares"])
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def _entitle(*words: str) -> None:
    """Have ``ps`` and psutil show these words as this process's command line."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"".join(word.encode() + b"\0" for word in words)
    assert len(text) < end - start, "the command line is longer than its room"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _settle(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    import numpy as np

    np.random.seed()  # noqa: NPY002 - what libraries that ask for no generator of their own use


class _Spare:
    """A fork of this process, made while nothing has happened in it, that waits for its work or for this one's end."""

    _links: ClassVar[list[socket.socket]] = []

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            for each in (self._link, *_Spare._links):
                each.close()
            _Spare._links.clear()
            _wait_for_work(theirs)
            sys.exit()
        theirs.close()
        _Spare._links.append(self._link)

    def work(self, order: dict[str, Any], files: Sequence[int]) -> int:
        """Let it begin, with these files; returns its process id when it leads the session that it shall have."""
        _Spare._links.remove(self._link)
        with self._link:
            _send(self._link, order, files)
            self._link.recv(64)
        return self.pid


def _wait_for_work(link: socket.socket) -> None:
    _entitle(sys.executable, "-m", _NAME, SPARE)
    order, files = _receive(link)
    if order is None:
        os._exit(0)
    _put(files, order["places"])
    if "code" in order:
        link.close()
        _settle(order["environment"])
        _entitle(sys.executable, *order["arguments"])
        sys.argv = ["-c", *order["arguments"]]
        exec(order["code"], {"__name__": "__main__"})  # noqa: S102 - multiprocessing's own words
        return
    if order["new_session"]:
        os.setsid()
    link.close()
    if order["gated"]:
        _wait_at_the_gate()
    _become(order | {"new_session": False})


def _wait_at_the_gate() -> None:
    """Do what the shell does that a supervisor starts its children with."""
    while (letter := os.read(0, 1)) != b"\n":
        if not letter:
            os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _fork_the_next_spawned() -> None:
    """Fork what ``multiprocessing`` will spawn now, while nothing has happened here; it waits for its work."""
    spare = _Spare()
    spawn = util.spawnv_passfds  # type: ignore[attr-defined]

    def spawnv_passfds(path: bytes, arguments: Sequence[str], passfds: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in arguments:  # its resource tracker
            return int(spawn(path, arguments, passfds))
        util.spawnv_passfds = spawn  # type: ignore[attr-defined]  # any further one is a fresh process
        place = list(arguments).index("-c")
        order = {
            "code": arguments[place + 1],
            "arguments": list(arguments[place + 2 :]),
            "places": list(passfds),
            "environment": dict(os.environ),
        }
        return spare.work(order, passfds)

    util.spawnv_passfds = spawnv_passfds  # type: ignore[attr-defined]


def _fork_the_next_started(count: int) -> None:
    """Fork what ``subprocess`` will start with ``python -m``, behind a supervisor's gate or without one."""
    spares = [_Spare() for _ in range(count)]
    fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]

    def fork_exec_or_spare(arguments: Sequence[str | bytes], *more: Any) -> int:
        from kvgate.supervision.child import GATE

        words = [os.fsdecode(each) for each in arguments]
        gated = tuple(words[: len(GATE)]) == GATE
        program = words[len(GATE) :] if gated else words
        if not spares or program[:2] != [sys.executable, "-m"]:
            return int(fork_exec(arguments, *more))
        _, _, _, folder, variables, stdin, _, _, stdout, _, stderr, _, _, _, new_session = more[:15]
        standard = {place: file for place, file in enumerate((stdin, stdout, stderr)) if file != -1}
        pairs = (os.fsdecode(each).partition("=") for each in variables or ())
        order = {
            "module": program[2],
            "arguments": program[3:],
            "environment": dict(os.environ) if variables is None else {name: value for name, _, value in pairs},
            "folder": os.fsdecode(folder or Path.cwd()),
            "spares": count if program[2] == "kvgate" else 0,  # a command that starts processes itself
            "new_session": bool(new_session),
            "gated": gated,
            "places": list(standard),
        }
        return spares.pop(0).work(order, list(standard.values()))

    subprocess._fork_exec = fork_exec_or_spare  # type: ignore[attr-defined]


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
    gc.freeze()  # no collection in a fork walks what all forks share
    order = _serve(link)
    if order is not None:
        _become(order)


if __name__ == "__main__":
    _main()
