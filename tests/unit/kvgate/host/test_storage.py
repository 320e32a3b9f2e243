"""What is told of a path's file system is what the kernel knows."""

import os
from pathlib import Path

import pytest

from kvgate.host.storage import direct_io_problem, file_system_of, held_bytes, nearest_existing


def test_a_path_that_is_not_there_lies_where_its_nearest_folder_lies(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "file"
    assert nearest_existing(deep) == tmp_path
    assert file_system_of(deep).mounted_on == file_system_of(tmp_path).mounted_on
    assert file_system_of(deep).free_bytes > 0


def test_shared_memory_is_known_as_memory_and_a_disk_is_not() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("this machine has no /dev/shm of its own")
    assert file_system_of(Path("/dev/shm/none/such")).is_memory
    assert not file_system_of(Path(__file__)).is_memory


def test_a_file_holds_what_was_written_not_what_was_promised(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 30)
    assert held_bytes(sparse) < 1 << 20
    (tmp_path / "full").write_bytes(b"x" * 100_000)
    assert held_bytes(tmp_path / "full") >= 98_304
    assert held_bytes(tmp_path / "absent") == 0


def test_the_probe_of_direct_io_leaves_nothing_behind(tmp_path: Path) -> None:
    direct_io_problem(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_direct_io_that_cannot_work_comes_with_a_reason(tmp_path: Path) -> None:
    assert direct_io_problem(tmp_path / "absent") == "No such file or directory"


def test_a_file_system_without_direct_io_is_found_out() -> None:
    assert direct_io_problem(Path("/proc")) is not None
