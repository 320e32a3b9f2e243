"""Digests of whole files: the same for the same bytes, computed once for each state of a file."""

import os
import threading
from pathlib import Path

import pytest

from engines.lmdeploy import file_digests
from engines.lmdeploy.file_digests import FileChangedError, FileDigests


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(100_000))
    return path


def digests(folder: Path) -> FileDigests:
    return FileDigests(folder / "digests", remembered_bytes=1)


def test_every_byte_counts_in_files_of_any_number_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "CHUNK_BYTES", 64)
    path = tmp_path / "weights"
    for size in (0, 1, 63, 64, 65, 200):
        path.write_bytes(bytes(size))
        seen = {digests(tmp_path).of(path)}
        for at in range(size):
            path.write_bytes(bytes(at) + b"\1" + bytes(size - at - 1))
            seen.add(digests(tmp_path).of(path))
        assert len(seen) == 1 + size


def test_equal_files_at_other_places_have_equal_digests(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes())
    assert digests(tmp_path).of(other) == FileDigests(tmp_path / "elsewhere").of(file)


def test_a_digest_is_computed_once_and_found_again_by_the_next_process(file: Path, tmp_path: Path) -> None:
    first, second = digests(tmp_path), digests(tmp_path)
    digest = first.of(file)
    assert [first.of(file), second.of(file)] == [digest, digest]
    assert (first.computed, second.computed) == (1, 0)


def overwrite(file: Path) -> None:
    """Other bytes of the same number, and the old time of modification."""
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"other")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace(file: Path) -> None:
    """Another file of the same size under the same name."""
    stat = file.stat()
    other = file.with_name("new")
    other.write_bytes(bytes(stat.st_size))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(file)


def append(file: Path) -> None:
    """One byte more."""
    with file.open("ab") as opened:
        opened.write(b"x")


@pytest.mark.parametrize("change", [overwrite, replace, append])
def test_a_file_that_changed_has_another_digest(file: Path, tmp_path: Path, change: object) -> None:
    assert callable(change)
    before = digests(tmp_path).of(file)
    change(file)
    after = digests(tmp_path)
    assert after.of(file) != before
    assert after.computed == 1


def test_a_link_is_known_by_what_it_points_to(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    before = digests(tmp_path).of(link)
    other = tmp_path / "other"
    other.write_bytes(b"other")
    link.unlink()
    link.symlink_to(other)
    assert digests(tmp_path).of(link) != before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', '{"version": 1, "digest": 3, "path": 1}'])
def test_a_damaged_entry_is_written_again(file: Path, tmp_path: Path, content: str) -> None:
    digest = digests(tmp_path).of(file)
    [entry] = (tmp_path / "digests").iterdir()
    entry.write_text(content)
    second, third = digests(tmp_path), digests(tmp_path)
    assert (second.of(file), second.computed) == (digest, 1)
    assert (third.of(file), third.computed) == (digest, 0)


def test_a_folder_that_can_not_be_used_costs_time_and_is_named(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blocked").touch()
    blocked = FileDigests(tmp_path / "blocked" / "digests", remembered_bytes=1)
    assert blocked.of(file) == digests(tmp_path).of(file)
    assert f"digests can't be kept in {tmp_path}/blocked/digests" in caplog.text


def test_small_files_leave_no_entry(file: Path, tmp_path: Path) -> None:
    FileDigests(tmp_path / "digests").of(file)
    assert not (tmp_path / "digests").exists()


def test_processes_that_start_together_compute_a_digest_once(file: Path, tmp_path: Path) -> None:
    both = [digests(tmp_path) for _ in range(4)]
    threads = [threading.Thread(target=each.of, args=(file,)) for each in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.computed for each in both) == 1


def test_a_file_that_is_being_written_is_refused_by_name(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tree(path: Path) -> bytes:
        append(path)
        return bytes(16)

    monkeypatch.setattr(file_digests, "_tree", tree)
    with pytest.raises(FileChangedError, match=f"{file} was written to"):
        digests(tmp_path).of(file)
