"""Real PostgreSQL and Redis servers of this machine, on free loopback ports, gone at the end of the block.

Where PostgreSQL or Redis is not installed a test is skipped with that reason; CI installs both. A PostgreSQL without
its client's programs is a broken installation, and fails a test.
"""

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program(name: str) -> str | None:
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(installed[-1]) if installed else shutil.which(name)


def _postgres_program(name: str) -> str:
    """Return a program of PostgreSQL: without a server the test is skipped, without another program it fails."""
    if _program("postgres") is None:
        pytest.skip("postgres is not installed (Debian's package postgresql)")
    found = _program(name)
    if found is None:
        pytest.fail(
            f"PostgreSQL is installed without {name} (Debian: postgresql-client-VERSION, which postgresql needs)"
        )
    return found


def _wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + _START_LIMIT_S
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        assert time.monotonic() < deadline_s, f"nothing listens on {port}:\n{log.read_text(errors='replace')}"
        time.sleep(0.05)
    pytest.fail(f"it ended with {process.returncode}:\n{log.read_text(errors='replace')}")


def _end(process: "subprocess.Popen[bytes]", number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Server:
    """A server process that a test may kill and start again on the same port with the same data."""

    def __init__(  # noqa: PLR0913 - by name
        self,
        command: list[str],
        port: int,
        log: Path,
        *,
        user: str | None,
        stop: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._environment = environment
        self._log = log
        self._user = user
        self._stop = stop
        self.port = port
        self.process = self._start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def again(self) -> None:
        self.process = self._start()

    def end(self) -> None:
        _end(self.process, self._stop)

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as output:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                user=self._user,
                cwd=self._log.parent,
                env=self._environment,
            )
        _wait_for(self.port, process, self._log)
        return process


@contextmanager
def _folder(name: str) -> Iterator[Path]:
    """A short path that another user can reach: sockets have a limit, and pytest's folders are the owner's alone."""
    folder = Path(tempfile.mkdtemp(prefix=f"kvgate-{name}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres() -> Iterator[str]:
    """Run PostgreSQL and give its URL."""
    with postgres_server() as server:
        yield postgres_url(server)


def postgres_url(server: Server) -> str:
    """Return the URL of a server of ``postgres_server``."""
    return f"postgresql://kvgate@127.0.0.1:{server.port}/postgres"


@contextmanager
def postgres_server() -> Iterator[Server]:
    """Run PostgreSQL; the user ``kvgate`` needs no password."""
    server, user = _postgres_program("postgres"), _postgres_user()
    with _folder("pg") as folder:
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"
        subprocess.run(["cp", "-a", _empty_cluster(), data], check=True, timeout=120)
        port = free_port()
        command = [server, "-D", str(data), "-p", str(port), "-k", str(folder), "-h", "127.0.0.1", "-F"]
        running = Server(command, port, folder / "log", user=user, stop=signal.SIGINT)
        try:
            _accepting(port, folder)
            yield running
        finally:
            running.end()


def _postgres_user() -> str | None:
    """Return the user that PostgreSQL runs as, which refuses to run as root; None is this process's own."""
    if os.geteuid() != 0:
        return None
    return "postgres" if any(each.pw_name == "postgres" for each in pwd.getpwall()) else "nobody"


@cache
def _empty_cluster() -> Path:
    """Return the data of a server that never ran; every server of this process begins with a copy."""
    user = _postgres_user()
    folder = Path(tempfile.mkdtemp(prefix="kvgate-pg-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if user is not None:
        shutil.chown(folder, user)
    data = folder / "data"
    subprocess.run(
        [_postgres_program("initdb"), "-D", data, "-A", "trust", "-U", "kvgate", "-E", "UTF8", "--no-sync"],
        check=True,
        user=user,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    return data


@contextmanager
def postgres_pair() -> Iterator[tuple[Server, Server]]:
    """Run PostgreSQL and a standby that follows it, which may be promoted (``SELECT pg_promote()``)."""
    copy, server = _postgres_program("pg_basebackup"), _postgres_program("postgres")
    user = _postgres_user()
    with postgres_server() as primary, _folder("pg") as folder:
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"
        source = ["-h", "127.0.0.1", "-p", str(primary.port), "-U", "kvgate"]
        subprocess.run(
            [copy, *source, "-D", data, "-R", "-X", "stream", "--checkpoint=fast", "--no-sync"],
            check=True,
            user=user,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            timeout=120,
        )
        data.chmod(0o700)
        port = free_port()
        command = [server, "-D", str(data), "-p", str(port), "-k", str(folder), "-h", "127.0.0.1", "-F"]
        standby = Server(command, port, folder / "log", user=user, stop=signal.SIGINT)
        try:
            _accepting(port, folder)
            yield primary, standby
        finally:
            standby.end()


def _accepting(port: int, folder: Path) -> None:
    """It listens before it is ready to answer."""
    ready = _postgres_program("pg_isready")
    deadline_s = time.monotonic() + _START_LIMIT_S
    while subprocess.run(
        [ready, "-q", "-h", "127.0.0.1", "-p", str(port)], check=False, cwd=folder, timeout=30
    ).returncode:
        assert time.monotonic() < deadline_s, "PostgreSQL did not become ready"
        time.sleep(0.05)


@contextmanager
def redis_server(*options: str) -> Iterator[Server]:
    """Run Redis (or Valkey) with nothing on disk; ``options`` are its own, like ``--maxmemory 1mb``."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        pytest.skip("neither valkey-server nor redis-server is installed (Debian's package redis-server)")
    with _folder("redis") as folder:
        port = free_port()
        command = [found, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options]
        running = Server(command, port, folder / "log", user=None, stop=signal.SIGTERM)
        try:
            yield running
        finally:
            running.end()


__all__ = ["Server", "free_port", "postgres", "postgres_pair", "postgres_server", "postgres_url", "redis_server"]
