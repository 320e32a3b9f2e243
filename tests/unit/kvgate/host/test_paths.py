import os
import shutil
from pathlib import Path

import pytest

from kvgate.failure import CommandError
from kvgate.host.paths import KEPT_RUNS, make_run_dir, make_socket_dir, remove_socket_dir, socket_endpoint, state_dir

GONE_PID = 2**22 + 1  # above the kernel's largest


def test_old_runs_are_dropped_and_running_ones_kept(tmp_path: Path) -> None:
    running = make_run_dir(tmp_path, pid=os.getpid(), now_s=0)
    ended = [make_run_dir(tmp_path, pid=GONE_PID, now_s=86_400 * day) for day in range(1, KEPT_RUNS + 5)]
    left = set((tmp_path / "runs").iterdir())
    assert running in left
    assert ended[-1] in left
    assert ended[0] not in left
    assert len(left) == KEPT_RUNS + 1


def test_a_state_dir_that_cannot_be_written_is_a_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match="cannot write the logs of this run") as failure:
        make_run_dir(tmp_path / "file", pid=1, now_s=0)
    assert "--state-dir" in failure.value.advice


def test_sockets_lie_in_a_private_folder_that_goes_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    stale = tmp_path / "kvgate" / str(GONE_PID)
    made = make_socket_dir(os.getpid())
    assert made == tmp_path / "kvgate" / str(os.getpid())
    assert made.stat().st_mode & 0o777 == 0o700
    stale.mkdir()
    (made / "left").touch()
    assert make_socket_dir(os.getpid()) == made
    assert not stale.exists(), "of a process that is gone"
    assert list(made.iterdir()) == []
    remove_socket_dir(made)
    assert not made.exists()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "kvgate").mkdir()
    (tmp_path / "kvgate").chmod(0o777)
    with pytest.raises(CommandError, match="not a private folder of this user"):
        make_socket_dir(1)


def test_a_path_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    assert socket_endpoint(Path("/run/kvgate/1"), "control") == "ipc:///run/kvgate/1/control"
    with pytest.raises(CommandError, match="too long for a socket"):
        socket_endpoint(tmp_path / ("x" * 100), "control")


def test_where_the_state_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_dir() == tmp_path / ".local" / "state" / "kvgate"
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert state_dir() == Path("/x/kvgate")


def test_a_full_disk_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr("kvgate.host.paths.shutil.disk_usage", lambda _: full)
    with pytest.raises(CommandError, match="is full: 1 MB free, logs and state need 32 MB"):
        make_run_dir(tmp_path, pid=1, now_s=0.0)
    assert list((tmp_path / "runs").iterdir()) == []
