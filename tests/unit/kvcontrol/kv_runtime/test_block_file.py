import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvcontrol.kv_runtime.block_file import BlockFile, BlockFileSpec
from kvcontrol.kv_runtime.errors import BlockFileError
from kvcontrol.kv_runtime.header import PAGE_BYTES
from tests.support.small_disk import small_disk


@pytest.fixture
def spec(tmp_path: Path) -> BlockFileSpec:
    return BlockFileSpec(path=tmp_path / "blocks", slots=8, block_bytes=5000, identity=b"\xaa\xbb", lock_timeout_s=0.0)


def test_a_new_file_is_the_owners_alone_and_takes_its_space_at_once(spec: BlockFileSpec) -> None:
    file = BlockFile(spec)
    found = spec.path.stat()
    assert file.fresh
    assert found.st_mode & 0o777 == 0o600
    assert found.st_size == spec.size_bytes == PAGE_BYTES + 8 * (4096 + 8192)
    assert found.st_blocks * 512 >= spec.size_bytes
    file.close()


def test_a_thin_file_takes_its_space_later(spec: BlockFileSpec) -> None:
    file = BlockFile(replace(spec, slots=1000, preallocate=False))
    assert spec.path.stat().st_blocks * 512 < 64 * 1024
    file.close()


def test_it_is_found_again(spec: BlockFileSpec) -> None:
    BlockFile(spec).close()
    file = BlockFile(spec)
    assert not file.fresh
    file.close()
    file.close()


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_its_capacity_may_change_and_what_is_left_stays(spec: BlockFileSpec, slots: int) -> None:
    file = BlockFile(spec)
    os.pwrite(file.fd, b"kept", spec.payload_at(0))
    file.close()
    other = replace(spec, slots=slots)
    file = BlockFile(other)
    assert spec.path.stat().st_size == other.size_bytes
    assert os.pread(file.fd, 4, spec.payload_at(0)) == b"kept"
    file.close()


def test_what_was_cut_off_by_a_smaller_capacity_is_gone(spec: BlockFileSpec) -> None:
    file = BlockFile(spec)
    os.pwrite(file.fd, b"gone", spec.payload_at(7))
    file.close()
    BlockFile(replace(spec, slots=2)).close()
    file = BlockFile(spec)
    assert os.pread(file.fd, 4, spec.payload_at(7)) == bytes(4)
    file.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"identity": b"\xcc"}, "another model or KV format .aabb, here cc."), ({"block_bytes": 4999}, "of 5000 bytes")],
)
def test_blocks_of_another_kind_are_refused_and_left_alone(
    spec: BlockFileSpec, change: dict[str, object], words: str
) -> None:
    BlockFile(spec).close()
    before = spec.path.read_bytes()
    with pytest.raises(BlockFileError, match=words):
        BlockFile(replace(spec, **change))
    assert spec.path.read_bytes() == before


@pytest.mark.parametrize("change", [{"identity": b"\xcc"}, {"block_bytes": 4999}, {"header_bytes": 2 * PAGE_BYTES}])
def test_a_file_of_the_same_owner_with_blocks_of_no_more_use_begins_anew(
    spec: BlockFileSpec, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    owned = replace(spec, owner=b"model")
    file = BlockFile(owned)
    os.pwrite(file.fd, b"stale", owned.payload_at(1))
    file.close()
    other = replace(owned, **change)
    file = BlockFile(other)
    assert file.fresh
    assert spec.path.stat().st_size == other.size_bytes
    assert not any(os.pread(file.fd, other.size_bytes - PAGE_BYTES, PAGE_BYTES))
    file.close()
    assert "holds 8 blocks of other weights or another configuration" in caplog.text
    file = BlockFile(other)
    assert not file.fresh
    file.close()


def test_a_file_that_another_version_wrote_begins_anew(spec: BlockFileSpec) -> None:
    spec.path.write_bytes((bytes(8) + b"kvfile\x00\x01").ljust(3 * PAGE_BYTES, b"x"))
    spec.path.chmod(0o600)
    file = BlockFile(replace(spec, owner=b"model"))
    assert file.fresh
    assert spec.path.stat().st_size == spec.size_bytes
    file.close()


def test_a_file_of_another_owner_is_refused_and_left_alone(spec: BlockFileSpec) -> None:
    BlockFile(replace(spec, owner=b"one")).close()
    before = spec.path.read_bytes()
    with pytest.raises(BlockFileError, match="another model"):
        BlockFile(replace(spec, owner=b"two"))
    assert spec.path.read_bytes() == before


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES + 1])
def test_headers_are_whole_pages(spec: BlockFileSpec, size: int) -> None:
    with pytest.raises(BlockFileError, match=f"headers of {size} bytes; they must be whole pages of 4096"):
        replace(spec, header_bytes=size)


@pytest.mark.parametrize("content", [b"x", b"notes" * 3000, bytes(9000)])
def test_a_file_of_something_else_is_refused_and_left_alone(spec: BlockFileSpec, content: bytes) -> None:
    spec.path.write_bytes(content)
    spec.path.chmod(0o600)
    with pytest.raises(BlockFileError, match="not a store of KV blocks"):
        BlockFile(spec)
    assert spec.path.read_bytes() == content


@pytest.mark.parametrize("at", [0, 5, 16, 30, 40])
def test_a_damaged_first_page_is_refused(spec: BlockFileSpec, at: int) -> None:
    BlockFile(spec).close()
    with spec.path.open("r+b") as raw:
        raw.seek(at)
        byte = raw.read(1)
        raw.seek(at)
        raw.write(bytes([byte[0] ^ 4]))
    with pytest.raises(BlockFileError, match=r"damaged first page|not a store"):
        BlockFile(spec)


def test_a_creation_that_was_cut_short_is_taken_up_again(spec: BlockFileSpec) -> None:
    file = BlockFile(spec)
    file._write_superblock(0)
    os.ftruncate(file.fd, PAGE_BYTES)
    file.close()
    BlockFile(spec).close()
    assert spec.path.stat().st_size == spec.size_bytes


def test_a_file_that_others_may_read_is_refused(spec: BlockFileSpec) -> None:
    BlockFile(spec).close()
    spec.path.chmod(0o640)
    with pytest.raises(BlockFileError, match="must be 600"):
        BlockFile(spec)


def test_a_link_is_not_followed(spec: BlockFileSpec, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch(0o600)
    spec.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BlockFileError, match="can't be opened"):
        BlockFile(spec)


def test_a_folder_is_no_file(spec: BlockFileSpec, tmp_path: Path) -> None:
    with pytest.raises(BlockFileError, match="can't be opened"):
        BlockFile(replace(spec, path=tmp_path))


def test_a_pipe_is_no_regular_file(spec: BlockFileSpec) -> None:
    os.mkfifo(spec.path, 0o600)
    with pytest.raises(BlockFileError, match="not a regular file"):
        BlockFile(spec)


def test_one_process_uses_it_at_a_time(spec: BlockFileSpec) -> None:
    file = BlockFile(spec)
    with pytest.raises(BlockFileError, match="in use by another process"):
        BlockFile(spec)
    file.close()
    BlockFile(spec).close()


def test_it_waits_for_a_process_that_is_on_its_way_out(spec: BlockFileSpec) -> None:
    BlockFile(spec).close()
    hold = (
        "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('held', flush=True); time.sleep(1)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(spec.path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BlockFileError, match="in use"):
            BlockFile(spec)
        BlockFile(replace(spec, lock_timeout_s=60.0)).close()
        assert other.wait(60) == 0


@pytest.mark.parametrize("change", [{"slots": 0}, {"block_bytes": 0}, {"identity": b""}, {"identity": bytes(33)}])
def test_a_spec_out_of_range_is_refused(spec: BlockFileSpec, change: dict[str, object]) -> None:
    with pytest.raises(BlockFileError, match=r"must be > 0|1 to 32"):
        replace(spec, **change)


def test_a_full_disk_is_found_at_the_start_and_left_with_its_space(spec: BlockFileSpec, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        big = replace(spec, path=disk / "blocks", slots=1000)
        with pytest.raises(BlockFileError, match=f"need {big.size_bytes} bytes; .* are free"):
            BlockFile(big)
        assert big.path.stat().st_size <= PAGE_BYTES
        BlockFile(replace(big, slots=8)).close()


def test_a_full_disk_costs_no_block_that_was_there(spec: BlockFileSpec, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        small = replace(spec, path=disk / "blocks")
        file = BlockFile(small)
        os.pwrite(file.fd, b"kept", small.payload_at(7))
        file.close()
        with pytest.raises(BlockFileError, match="are free"):
            BlockFile(replace(small, slots=1000))
        file = BlockFile(small)
        assert os.pread(file.fd, 4, small.payload_at(7)) == b"kept"
        file.close()


def test_direct_io_is_switched_on_where_it_works(spec: BlockFileSpec) -> None:
    file = BlockFile(spec)
    assert file.direct() == bool(fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT)
    file.close()
