"""Where kvgate keeps things: durable state with the logs of each run, and short-lived sockets.

- State: ``$XDG_STATE_HOME/kvgate`` (``~/.local/state/kvgate``), or what ``--state-dir`` names. Holds the gateway's
  store and ``runs/<time>-<pid>/*.log`` of the last runs.
- Sockets: ``$XDG_RUNTIME_DIR/kvgate`` or ``/tmp/kvgate-<uid>``, one private folder a process, named by its pid. Apart
  from the state, because the path of a Unix socket is short (ZMQ leaves 100 bytes).
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from kvgate.failure import CommandError

KEPT_RUNS = 10
LEAST_LOG_BYTES = 32 * 10**6
MAX_SOCKET_PATH_BYTES = 100
_PRIVATE = 0o700


def state_dir() -> Path:
    """Return the default folder for durable state; it need not exist."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "kvgate"


def make_run_dir(state: Path, *, pid: int, now_s: float) -> Path:
    """Create a folder for one run's logs and drop the oldest, keeping ``KEPT_RUNS``; raises ``CommandError``."""
    runs = state / "runs"
    made = runs / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}-{pid}"
    try:
        made.mkdir(parents=True, mode=_PRIVATE)
        free_bytes = shutil.disk_usage(made).free
        if free_bytes < LEAST_LOG_BYTES:
            made.rmdir()
            raise CommandError(
                f"the disk of {state} is full: {free_bytes // 10**6} MB free, logs and state need "
                f"{LEAST_LOG_BYTES // 10**6} MB",
                "free some, or name another folder with --state-dir (or KVGATE_STATE_DIR)",
            )
        old = sorted(folder for folder in runs.iterdir() if folder.is_dir() and not _is_running(folder))
        for folder in old[: max(0, len(old) - KEPT_RUNS)]:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise CommandError(
            f"cannot write the logs of this run to {made}: {error.strerror}",
            "name another folder with --state-dir (or KVGATE_STATE_DIR)",
        ) from error
    return made


def make_socket_dir(pid: int) -> Path:
    """Create this process's private folder for sockets and remove those of processes that are gone.

    Raises ``CommandError`` when the parent belongs to someone else or can't be written.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    parent = (
        Path(base) / "kvgate" if base and Path(base).is_dir() else Path(tempfile.gettempdir(), f"kvgate-{os.getuid()}")
    )
    made = parent / str(pid)
    try:
        parent.mkdir(mode=_PRIVATE, exist_ok=True)
        owner = parent.lstat()
        if owner.st_uid != os.getuid() or owner.st_mode & 0o077 or not parent.is_dir() or parent.is_symlink():
            raise CommandError(
                f"{parent} is not a private folder of this user",
                "remove the folder, or set XDG_RUNTIME_DIR to a folder of your own",
            )
        for folder in parent.iterdir():
            if folder.name.isdigit() and not psutil.pid_exists(int(folder.name)):
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(made, ignore_errors=True)  # of an earlier process with this pid
        made.mkdir(mode=_PRIVATE)
    except OSError as error:
        raise CommandError(f"cannot create the folder for sockets {made}: {error.strerror}") from error
    return made


def remove_socket_dir(folder: Path) -> None:
    """Remove a process's folder for sockets; what is left of a killed process goes when another one starts."""
    shutil.rmtree(folder, ignore_errors=True)


def socket_endpoint(folder: Path, name: str) -> str:
    """Return ``ipc://folder/name``; raises ``CommandError`` when the path is too long for a Unix socket."""
    path = folder / name
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise CommandError(
            f"{path} is longer than {MAX_SOCKET_PATH_BYTES} bytes, too long for a socket",
            "set XDG_RUNTIME_DIR to a shorter folder",
        )
    return f"ipc://{path}"


def _is_running(run: Path) -> bool:
    pid = run.name.rpartition("-")[2]
    return pid.isdigit() and psutil.pid_exists(int(pid))
