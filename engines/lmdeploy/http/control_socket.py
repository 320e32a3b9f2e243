"""Where api_server and engine process meet when nobody said where: a Unix socket that only this user can reach.

One folder a process, named by its pid, below ``$XDG_RUNTIME_DIR/kvgate`` or ``<tmp>/kvgate-<uid>``: what a killed
process left behind goes when the next one starts.
"""

import os
import shutil
import tempfile
from pathlib import Path

import psutil

from engines.lmdeploy.settings import ENV_PREFIX, MAX_IPC_PATH_BYTES, SettingsError

_PRIVATE = 0o700
_OTHERS = 0o077


def private_endpoint(pid: int) -> str:
    """Make the folder of process ``pid``, sweep those of processes that are gone, and return the endpoint in it.

    Raises ``SettingsError``, which names the variable that says where else, when the folder can't be had.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parent = Path(runtime) / "kvgate" if runtime else Path(tempfile.gettempdir()) / f"kvgate-{os.getuid()}"
    remedy = f"set {ENV_PREFIX}CONTROL_ENDPOINT=ipc:///…"
    folder = parent / str(pid)
    path = folder / "control"
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise SettingsError(f"{path} is longer than {MAX_IPC_PATH_BYTES} bytes, too long for a socket; {remedy}")
    try:
        parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        owner = parent.lstat()
        if parent.is_symlink() or owner.st_uid != os.getuid() or owner.st_mode & _OTHERS:
            raise SettingsError(f"{parent} is not a private folder of this user; remove it or {remedy}")
        for left in parent.iterdir():
            if left.name.isdecimal() and not psutil.pid_exists(int(left.name)):
                shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier process with this pid
        folder.mkdir(mode=_PRIVATE)
    except OSError as error:
        raise SettingsError(f"can't make the folder for the control socket {folder}: {error}; {remedy}") from error
    return f"ipc://{path}"
