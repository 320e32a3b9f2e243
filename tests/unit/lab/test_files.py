"""Commands' files are whole, or what was there before."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.files import write_picture, write_whole


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes: the operating system refuses as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_no_half_file_and_what_was_there_before(tmp_path: Path) -> None:
    old = tmp_path / "report.json"
    old.write_text("old")
    for path in (old, tmp_path / "new.json"):
        with room_for(100), pytest.raises(OSError, match="too large"):
            write_whole(path, b"x" * 1000)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("report.json", "old")]
    write_whole(old, b"new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("report.json", "new")]


def test_links_and_permissions_stay_and_pipes_are_written_to(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, b"said")
        assert os.read(end, 9) == b"said"
    finally:
        os.close(end)


@pytest.mark.parametrize(("name", "begins"), [("a.PNG", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_pictures_are_of_the_format_that_the_name_ends_in(tmp_path: Path, name: str, begins: bytes) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1))
    write_picture(figure, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
