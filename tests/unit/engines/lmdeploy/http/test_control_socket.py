"""The default control socket: private, short enough, and no litter of processes that were killed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.lmdeploy.http.control_socket import private_endpoint
from engines.lmdeploy.settings import SettingsError


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "kvgate"


def test_the_socket_lies_in_a_folder_that_only_this_user_can_enter(runtime: Path) -> None:
    endpoint = private_endpoint(os.getpid())
    folder = runtime / str(os.getpid())
    assert endpoint == f"ipc://{folder}/control"
    assert folder.stat().st_mode & 0o777 == runtime.stat().st_mode & 0o777 == 0o700


def test_folders_of_processes_that_are_gone_are_swept_and_others_stay(runtime: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    for name in (str(gone.pid), str(os.getppid()), "notes"):
        (runtime / name).mkdir(parents=True)
    runtime.chmod(0o700)
    private_endpoint(os.getpid())
    private_endpoint(os.getpid())
    assert {folder.name for folder in runtime.iterdir()} == {str(os.getpid()), str(os.getppid()), "notes"}


def test_a_folder_that_others_can_enter_is_refused(runtime: Path) -> None:
    runtime.mkdir()
    runtime.chmod(0o755)
    with pytest.raises(
        SettingsError, match="not a private folder of this user; remove it or set KVGATE_ENGINE_CONTROL"
    ):
        private_endpoint(os.getpid())


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(SettingsError, match="longer than 100 bytes"):
        private_endpoint(os.getpid())
