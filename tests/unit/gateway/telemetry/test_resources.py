"""What the gateway runs out of is a problem once, and none when there is enough again."""

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.problems import ProblemKind, Problems
from gateway.telemetry.resources import Resources
from tests.support.small_disk import small_disk


@contextmanager
def few_files(more: int) -> Iterator[None]:
    """While the block runs, this process may open so many files more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def kinds(problems: Problems) -> list[ProblemKind]:
    return [each.kind for each in problems.all()]


@pytest.mark.parametrize("left", [0, 1])
def test_running_out_of_file_descriptors_is_said_once_with_what_to_do(
    left: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    problems = Problems()
    resources = Resources(problems, folder=None)
    resources.look()
    assert kinds(problems) == []
    with few_files(left):
        for _ in range(3):
            resources.look()
    assert kinds(problems) == [ProblemKind.FILES]
    resources.look()
    assert kinds(problems) == []
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "ulimit -n" in said[0]
    assert "no problem any more" in said[1]


def test_a_full_disk_of_the_store_is_said_once_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with small_disk(tmp_path / "disk", size_bytes=20 << 20) as folder:
        problems = Problems()
        resources = Resources(problems, folder=folder)
        resources.look()
        assert kinds(problems) == []
        (folder / "other").write_bytes(bytes(6 << 20))
        for _ in range(3):
            resources.look()
        assert kinds(problems) == [ProblemKind.DISK]
        (folder / "other").unlink()
        resources.look()
        assert kinds(problems) == []
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "Free some space" in said[0]
