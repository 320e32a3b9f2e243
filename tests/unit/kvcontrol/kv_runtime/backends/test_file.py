import fcntl
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import BackendError, BlockFileSpec, BlockStatus, HostArena, Move, Recovered
from kvcontrol.kv_runtime.backends.file import FileBackend
from kvcontrol.kv_runtime.header import header_bytes_for
from tests.support import block_writer
from tests.support.killed import ROOT, write_and_kill
from tests.support.kv_blocks import Block, get, put, random_block
from tests.support.small_disk import small_disk

SLOTS = 6
BLOCK_BYTES = 9001
OK, CORRUPT, FAILED, NO_SPACE = BlockStatus.OK, BlockStatus.CORRUPT, BlockStatus.FAILED, BlockStatus.NO_SPACE


@pytest.fixture(params=[64, 4096], ids=["blocks of 64 tokens", "blocks of 4096 tokens"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> BlockFileSpec:
    return BlockFileSpec(
        path=tmp_path / "folder" / "blocks",
        slots=SLOTS,
        block_bytes=BLOCK_BYTES,
        identity=b"model",
        header_bytes=header_bytes_for(request.param),
        lock_timeout_s=0.0,
    )


@pytest.fixture
def arena() -> Iterator[HostArena]:
    made = HostArena(slots=SLOTS, block_bytes=BLOCK_BYTES)
    yield made
    made.close()


@pytest.fixture
def blocks(arena: HostArena) -> list[Block]:
    rng = random.Random(5)  # noqa: S311 - reproducible, not secret
    made = [random_block(rng, BLOCK_BYTES) for _ in range(SLOTS)]
    for slot, block in enumerate(made):
        put(arena, slot, block.data)
    return made


@pytest.fixture
def tier(spec: BlockFileSpec, arena: HostArena, blocks: list[Block]) -> Iterator[FileBackend]:
    made = FileBackend(spec)
    assert made.write(_moves(blocks), arena) == [OK] * SLOTS
    yield made
    made.close()


def _moves(blocks: list[Block]) -> list[Move]:
    return [Move(slot, slot, block.seal) for slot, block in enumerate(blocks)]


def _flip(path: Path, at: int) -> None:
    with path.open("r+b", buffering=0) as raw:
        raw.seek(at)
        byte = raw.read(1)
        raw.seek(at)
        raw.write(bytes([byte[0] ^ 0x10]))


def test_it_is_the_nvme_tier_of_the_servers_user_alone(tier: FileBackend, spec: BlockFileSpec) -> None:
    assert tier.tier is CacheTier.NVME
    assert spec.path.stat().st_mode & 0o777 == 0o600
    assert spec.path.parent.stat().st_mode & 0o777 == 0o700


def test_blocks_are_found_again(tier: FileBackend, spec: BlockFileSpec, arena: HostArena, blocks: list[Block]) -> None:
    tier.close()
    again = FileBackend(spec)
    assert again.recover() == [Recovered(slot, block.seal) for slot, block in enumerate(blocks)]
    for slot in range(SLOTS):
        put(arena, slot, b"\xff" * BLOCK_BYTES)
    assert again.read(_moves(blocks), arena) == [OK] * SLOTS
    assert [get(arena, slot) for slot in range(SLOTS)] == [block.data for block in blocks]
    again.close()


def test_a_new_file_holds_nothing(spec: BlockFileSpec) -> None:
    tier = FileBackend(spec)
    assert tier.recover() == []
    tier.close()


def test_erased_slots_are_not_found_again_and_read_as_corrupt(
    tier: FileBackend, spec: BlockFileSpec, arena: HostArena, blocks: list[Block]
) -> None:
    assert tier.erase([1, 4, 4]) == [OK] * 3
    assert tier.read(_moves(blocks), arena) == [OK, CORRUPT, OK, OK, CORRUPT, OK]
    tier.close()
    again = FileBackend(spec)
    assert [found.slot for found in again.recover()] == [0, 2, 3, 5]
    assert again.erase([0]) == [OK]
    again.close()
    again = FileBackend(spec)
    assert [found.slot for found in again.recover()] == [2, 3, 5]
    again.close()


def test_a_slot_outside_can_not_be_erased(tier: FileBackend) -> None:
    with pytest.raises(IndexError):
        tier.erase([0, SLOTS])
    assert len(tier.recover()) == 0  # fresh: nothing to find again


def test_a_block_without_a_seal_is_an_error(tier: FileBackend, arena: HostArena) -> None:
    with pytest.raises(ValueError, match="without its seal"):
        tier.write([Move(0, 0)], arena)
    with pytest.raises(ValueError, match="without its seal"):
        tier.read([Move(0, 0)], arena)


def test_a_record_that_fits_no_header_is_an_error(tier: FileBackend, arena: HostArena, blocks: list[Block]) -> None:
    seal = blocks[0].seal
    with pytest.raises(ValueError, match="at most"):
        tier.write([Move(0, 0, seal._replace(record=seal.record._replace(tokens=bytes(tier.record_bytes))))], arena)


def test_a_slot_with_another_block_never_gives_its_bytes_for_ours(
    tier: FileBackend, arena: HostArena, blocks: list[Block]
) -> None:
    assert tier.write([Move(2, 0, blocks[0].seal)], arena) == [OK]
    assert tier.read([Move(2, 3, blocks[2].seal)], arena) == [CORRUPT]
    assert "another block" in tier.last_error
    assert tier.read([Move(2, 3, blocks[0].seal)], arena) == [OK]


def test_equal_bytes_under_another_record_are_another_block(
    tier: FileBackend, arena: HostArena, blocks: list[Block]
) -> None:
    seal = blocks[0].seal
    for record in (
        seal.record._replace(tenant="other"),
        seal.record._replace(tokens=bytes(4)),
        seal.record._replace(parent=blocks[1].seal.record.key),
    ):
        assert tier.read([Move(0, 3, seal._replace(record=record))], arena) == [CORRUPT]


@pytest.mark.parametrize("at", [0, 9, 40, 100, 4095, 4096, 8000, 4096 + BLOCK_BYTES - 1])
def test_a_flipped_bit_in_header_or_payload_is_corrupt(
    tier: FileBackend, spec: BlockFileSpec, arena: HostArena, blocks: list[Block], at: int
) -> None:
    _flip(spec.path, spec.header_at(3) + at)
    assert tier.read(_moves(blocks), arena) == [OK, OK, OK, CORRUPT, OK, OK]
    assert "slot 3" in tier.last_error


def test_a_flipped_bit_in_a_header_is_an_empty_slot_after_a_restart_that_can_be_used(
    tier: FileBackend, spec: BlockFileSpec, arena: HostArena, blocks: list[Block]
) -> None:
    tier.close()
    _flip(spec.path, spec.header_at(3) + 50)
    again = FileBackend(spec)
    assert [found.slot for found in again.recover()] == [0, 1, 2, 4, 5]
    put(arena, 3, blocks[3].data)
    assert again.write([Move(3, 3, blocks[3].seal)], arena) == [OK]
    assert again.read([Move(3, 3, blocks[3].seal)], arena) == [OK]
    again.close()


def test_a_file_cut_short_loses_what_was_cut_and_no_more(
    tier: FileBackend, spec: BlockFileSpec, arena: HostArena, blocks: list[Block]
) -> None:
    os.truncate(spec.path, spec.payload_at(4) + 100)
    assert tier.read(_moves(blocks), arena) == [OK, OK, OK, OK, CORRUPT, CORRUPT]
    assert "the file ends" in tier.last_error
    put(arena, 4, blocks[4].data)
    assert tier.write([Move(4, 4, blocks[4].seal)], arena) == [OK]
    assert tier.read([Move(4, 4, blocks[4].seal)], arena) == [OK]
    tier.close()
    os.truncate(spec.path, spec.header_at(2) + 10)
    again = FileBackend(spec)
    assert [found.slot for found in again.recover()] == [0, 1]
    again.close()


def test_a_file_cut_and_stretched_again_is_empty_not_wrong(
    tier: FileBackend, spec: BlockFileSpec, arena: HostArena, blocks: list[Block]
) -> None:
    os.truncate(spec.path, spec.payload_at(4) + 100)
    os.truncate(spec.path, spec.size_bytes)
    assert tier.read(_moves(blocks), arena) == [OK, OK, OK, OK, CORRUPT, CORRUPT]


def test_a_deleted_file_serves_on_and_is_empty_at_the_next_start(
    tier: FileBackend, spec: BlockFileSpec, arena: HostArena, blocks: list[Block]
) -> None:
    spec.path.unlink()
    assert tier.read(_moves(blocks), arena) == [OK] * SLOTS
    other = FileBackend(spec)
    assert other.recover() == []
    assert other.read(_moves(blocks), arena) == [CORRUPT] * SLOTS
    assert tier.read(_moves(blocks), arena) == [OK] * SLOTS
    other.close()


def test_a_file_overwritten_from_outside_is_corrupt(
    tier: FileBackend, spec: BlockFileSpec, arena: HostArena, blocks: list[Block]
) -> None:
    spec.path.write_bytes(os.urandom(spec.size_bytes))
    assert tier.read(_moves(blocks), arena) == [CORRUPT] * SLOTS


def test_a_device_that_fails_is_a_status(tier: FileBackend, arena: HostArena, blocks: list[Block]) -> None:
    broken = os.open("/proc/self/mem", os.O_RDWR)  # its first pages can't be read or written: EIO
    os.dup2(broken, tier._file.fd)
    os.close(broken)
    assert tier.read(_moves(blocks), arena) == [FAILED] * SLOTS
    assert "Input/output error" in tier.last_error
    assert tier.write(_moves(blocks), arena) == [FAILED] * SLOTS
    assert tier.erase([0]) == [FAILED]


def test_a_closed_file_is_a_status(tier: FileBackend, arena: HostArena, blocks: list[Block]) -> None:
    tier.close()
    assert tier.read(_moves(blocks), arena) == [FAILED] * SLOTS
    assert tier.write(_moves(blocks), arena) == [FAILED] * SLOTS


def test_a_disk_that_fills_up_refuses_blocks_and_keeps_the_others(
    spec: BlockFileSpec, arena: HostArena, blocks: list[Block], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=1 << 16) as disk:
        thin = replace(spec, path=disk / "blocks", preallocate=False)
        tier = FileBackend(thin)
        statuses = tier.write(_moves(blocks), arena)
        fit = statuses.count(OK)
        assert 0 < fit < SLOTS
        assert statuses == [OK] * fit + [NO_SPACE] * (SLOTS - fit)
        assert "No space left" in tier.last_error
        assert tier.read(_moves(blocks), arena) == [OK] * fit + [CORRUPT] * (SLOTS - fit)
        tier.close()
        tier = FileBackend(thin)
        assert [found.slot for found in tier.recover()] == list(range(fit))
        put(arena, 0, blocks[1].data)
        assert tier.write([Move(0, 0, blocks[1].seal)], arena) == [OK]
        tier.close()


_LIMITED = """
import resource, sys
from pathlib import Path
from kvcontrol.kv_runtime import BlockFileSpec, BlockStatus, HostArena, Move
from kvcontrol.kv_runtime.backends.file import FileBackend
from tests.support.block_writer import BLOCK_BYTES, SLOTS, sealed
spec = BlockFileSpec(path=Path(sys.argv[1]), slots=SLOTS, block_bytes=BLOCK_BYTES, identity=b"m", preallocate=False)
tier, arena = FileBackend(spec), HostArena(slots=1, block_bytes=BLOCK_BYTES)
resource.setrlimit(resource.RLIMIT_FSIZE, (spec.payload_at(3) + 8192, resource.RLIM_INFINITY))
statuses = []
for slot in range(SLOTS):
    data, seal = sealed(bytes([slot]) * 16)
    arena.view(0)[:] = data
    statuses += tier.write([Move(slot, 0, seal)], arena)
print(*statuses)
"""


def test_a_file_that_may_grow_no_more_refuses_blocks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LIMITED, str(tmp_path / "blocks")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["ok"] * 3 + ["no_space"] * (block_writer.SLOTS - 3)


def test_blocks_of_another_model_are_refused_and_kept(
    tier: FileBackend, spec: BlockFileSpec, blocks: list[Block]
) -> None:
    tier.close()
    with pytest.raises(BackendError, match="another model"):
        FileBackend(replace(spec, identity=b"other"))
    with pytest.raises(BackendError, match="blocks of 9001 bytes, here 100"):
        FileBackend(replace(spec, block_bytes=100))
    again = FileBackend(spec)
    assert len(again.recover()) == len(blocks)
    again.close()


def test_two_never_share_a_file(tier: FileBackend, spec: BlockFileSpec) -> None:
    assert tier.last_error == ""
    with pytest.raises(BackendError, match="in use by another process"):
        FileBackend(spec)


def test_a_folder_that_can_not_be_made_is_an_error(spec: BlockFileSpec, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(BackendError, match="can't be made"):
        FileBackend(replace(spec, path=tmp_path / "taken" / "blocks"))


def test_a_disk_that_is_too_small_is_an_error_at_the_start(spec: BlockFileSpec, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk, pytest.raises(BackendError, match="are free"):
        FileBackend(replace(spec, path=disk / "blocks", slots=1000))


def test_through_the_page_cache_the_bytes_are_the_same(
    tier: FileBackend, arena: HostArena, blocks: list[Block]
) -> None:
    flags = fcntl.fcntl(tier._file.fd, fcntl.F_GETFL)
    fcntl.fcntl(tier._file.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    moves = _moves(blocks)[:3]
    for move in moves:
        put(arena, move.host, bytes(BLOCK_BYTES))
    assert tier.read(moves, arena) == [OK] * 3
    assert [get(arena, slot) for slot in range(SLOTS)] == [block.data for block in blocks]
    assert tier.write(_moves(blocks), arena) == [OK] * SLOTS
    assert tier.read(_moves(blocks), arena) == [OK] * SLOTS


def test_many_threads_on_one_slot_give_one_of_their_blocks_or_corrupt(spec: BlockFileSpec, blocks: list[Block]) -> None:
    tier = FileBackend(spec)
    wrong: list[str] = []

    def worker(mine: int) -> None:
        own = HostArena(slots=1, block_bytes=BLOCK_BYTES)
        block = blocks[mine]
        for _ in range(50):
            put(own, 0, block.data)
            tier.write([Move(0, 0, block.seal)], own)
            if tier.read([Move(0, 0, block.seal)], own) == [OK] and get(own, 0) != block.data:
                wrong.append("another's bytes as ours")
        own.close()

    threads = [threading.Thread(target=worker, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []
    tier.close()


@pytest.mark.parametrize("seed", range(4))
def test_after_a_kill_every_block_that_is_found_is_whole(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "blocks"
    arena = HostArena(slots=1, block_bytes=block_writer.BLOCK_BYTES)
    for life in range(2):
        write_and_kill("file", path, seed=100 * seed + life)
        tier = FileBackend(block_writer.spec_at(path))
        found = tier.recover()
        assert len(found) >= block_writer.SLOTS - 1
        for slot, seal in found:
            assert tier.read([Move(slot, 0, seal)], arena) == [OK]
            assert get(arena, 0) == block_writer.bytes_of(seal.record.key)
        tier.close()
    arena.close()
