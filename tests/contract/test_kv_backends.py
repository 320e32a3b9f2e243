"""What every tier's backend does, whatever its memory is made of."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import BlockFileSpec, BlockStatus, HostArena, KVBackendProtocol, Move
from kvcontrol.kv_runtime.backends.file import FileBackend
from kvcontrol.kv_runtime.backends.torch import TorchBackend
from tests.support.kv_blocks import Block, get, pool_rows, put, random_block
from tests.support.memory_tier import MemoryDisk, MemoryTier

SLOTS = 24
PAGE = 1040  # a block of it fills no whole number of memory pages
ROWS = 6
BLOCK_BYTES = ROWS * PAGE

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _one_pool(_: Path) -> KVBackendProtocol:
    return TorchBackend(pool_rows((ROWS, SLOTS, PAGE)))


def _paged(_: Path) -> KVBackendProtocol:
    return TorchBackend(pool_rows((ROWS, SLOTS, PAGE // 4), pages=4), pages=4)


def _two_pools(_: Path) -> KVBackendProtocol:
    return TorchBackend(pool_rows((2, SLOTS, 2 * PAGE)) | pool_rows((4, SLOTS, PAGE // 2), name="1"))


def _single_rows(_: Path) -> KVBackendProtocol:
    rows = [pool_rows((1, SLOTS, PAGE), name=str(row)) for row in range(ROWS)]
    return TorchBackend({name: tensor for row in rows for name, tensor in row.items()})


def _on_cuda(_: Path) -> KVBackendProtocol:
    return TorchBackend(pool_rows((ROWS, SLOTS, PAGE), device="cuda"))


def _spec(folder: Path) -> BlockFileSpec:
    return BlockFileSpec(path=folder / "tier" / "blocks", slots=SLOTS, block_bytes=BLOCK_BYTES, identity=b"model")


def _file(folder: Path) -> KVBackendProtocol:
    return FileBackend(_spec(folder))


def _thin_file(folder: Path) -> KVBackendProtocol:
    return FileBackend(replace(_spec(folder), preallocate=False))


def _memory(_: Path) -> KVBackendProtocol:
    return MemoryTier(CacheTier.HBM, capacity_blocks=SLOTS, block_bytes=BLOCK_BYTES)


def _memory_disk(_: Path) -> KVBackendProtocol:
    return MemoryDisk(capacity_blocks=SLOTS, block_bytes=BLOCK_BYTES)


BACKENDS = [
    pytest.param(_memory, id="memory"),
    pytest.param(_memory_disk, id="memory-disk"),
    pytest.param(_one_pool, id="torch"),
    pytest.param(_paged, id="torch-pages"),
    pytest.param(_two_pools, id="torch-two-pools"),
    pytest.param(_single_rows, id="torch-single-rows"),
    pytest.param(_on_cuda, id="torch-cuda", marks=cuda),
    pytest.param(_file, id="file"),
    pytest.param(_thin_file, id="file-thin"),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVBackendProtocol]:
    make: Callable[[Path], KVBackendProtocol] = request.param
    made = make(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["own", "shared"])
def arena(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostArena]:
    if request.param == "shared":
        made = HostArena.in_file(replace(_spec(tmp_path), path=tmp_path / "arena"))
    else:
        made = HostArena(slots=SLOTS, block_bytes=BLOCK_BYTES)
    yield made
    made.close()


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)  # noqa: S311 - reproducible, not secret


def _fill(arena: HostArena, rng: random.Random) -> list[Block]:
    blocks = [random_block(rng, BLOCK_BYTES) for _ in range(SLOTS)]
    for slot, block in enumerate(blocks):
        put(arena, slot, block.data)
    return blocks


def test_it_says_how_large_it_is(backend: KVBackendProtocol) -> None:
    assert (backend.capacity_blocks, backend.block_bytes) == (SLOTS, BLOCK_BYTES)


def test_what_was_written_is_read_back_byte_for_byte(
    backend: KVBackendProtocol, arena: HostArena, rng: random.Random
) -> None:
    blocks = _fill(arena, rng)
    slots = rng.sample(range(SLOTS), SLOTS)
    moves = [Move(slots[host], host, block.seal) for host, block in enumerate(blocks)]
    assert backend.write(moves, arena) == [BlockStatus.OK] * SLOTS
    _fill(arena, rng)
    back = rng.sample(range(SLOTS), SLOTS)
    reads = [Move(slots[n], back[n], block.seal) for n, block in enumerate(blocks)]
    assert backend.read(reads, arena) == [BlockStatus.OK] * SLOTS
    assert [get(arena, back[n]) for n in range(SLOTS)] == [block.data for block in blocks]


def test_a_write_changes_its_slots_alone(backend: KVBackendProtocol, arena: HostArena, rng: random.Random) -> None:
    first = _fill(arena, rng)
    backend.write([Move(slot, slot, block.seal) for slot, block in enumerate(first)], arena)
    second = _fill(arena, rng)
    changed = {slot: second[slot] for slot in (0, 5, 6, SLOTS - 1)}
    backend.write([Move(slot, slot, block.seal) for slot, block in changed.items()], arena)
    _fill(arena, rng)
    want = [changed.get(slot, first[slot]) for slot in range(SLOTS)]
    assert backend.read([Move(slot, slot, want[slot].seal) for slot in range(SLOTS)], arena) == [BlockStatus.OK] * SLOTS
    assert [get(arena, slot) for slot in range(SLOTS)] == [block.data for block in want]


def test_a_read_changes_its_arena_slots_alone(backend: KVBackendProtocol, arena: HostArena, rng: random.Random) -> None:
    blocks = _fill(arena, rng)
    backend.write([Move(3, 3, blocks[3].seal)], arena)
    assert backend.read([Move(3, 9, blocks[3].seal)], arena) == [BlockStatus.OK]
    blocks[9] = blocks[3]
    assert [get(arena, slot) for slot in range(SLOTS)] == [block.data for block in blocks]


def test_threads_move_distinct_slots_at_once(backend: KVBackendProtocol, arena: HostArena) -> None:
    wrong: list[str] = []

    def worker(mine: range, seed: int) -> None:
        own = random.Random(seed)  # noqa: S311 - reproducible, not secret
        for _ in range(20):
            fresh = {slot: random_block(own, BLOCK_BYTES) for slot in mine}
            for slot, block in fresh.items():
                put(arena, slot, block.data)
            moves = [Move(slot, slot, block.seal) for slot, block in fresh.items()]
            if backend.write(moves, arena) != [BlockStatus.OK] * len(moves):
                wrong.append(backend.last_error or "write")
            for slot in mine:
                put(arena, slot, own.randbytes(BLOCK_BYTES))
            if backend.read(moves, arena) != [BlockStatus.OK] * len(moves):
                wrong.append(backend.last_error or "read")
            wrong.extend("bytes" for slot, block in fresh.items() if get(arena, slot) != block.data)

    threads = [threading.Thread(target=worker, args=(range(n, SLOTS, 4), n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []


def test_no_move_is_no_work(backend: KVBackendProtocol, arena: HostArena) -> None:
    assert backend.read([], arena) == []
    assert backend.write([], arena) == []


@pytest.mark.parametrize("bad", [(-1, 0), (SLOTS, 0), (0, -1), (0, SLOTS)])
def test_a_slot_outside_is_an_error_and_moves_nothing(
    backend: KVBackendProtocol, arena: HostArena, rng: random.Random, bad: tuple[int, int]
) -> None:
    blocks = _fill(arena, rng)
    backend.write([Move(1, 1, blocks[1].seal)], arena)
    fresh = random_block(rng, BLOCK_BYTES)
    put(arena, 2, fresh.data)
    with pytest.raises(IndexError):
        backend.write([Move(1, 2, fresh.seal), Move(*bad, fresh.seal)], arena)
    before = get(arena, 4)
    with pytest.raises(IndexError):
        backend.read([Move(1, 4, blocks[1].seal), Move(*bad, fresh.seal)], arena)
    assert get(arena, 4) == before
    assert backend.read([Move(1, 4, blocks[1].seal)], arena) == [BlockStatus.OK]
    assert get(arena, 4) == blocks[1].data


def test_an_arena_of_other_blocks_is_an_error(backend: KVBackendProtocol, rng: random.Random) -> None:
    other = HostArena(slots=2, block_bytes=BLOCK_BYTES + 1)
    seal = random_block(rng, BLOCK_BYTES).seal
    with pytest.raises(ValueError, match="blocks of"):
        backend.read([Move(0, 0, seal)], other)
    with pytest.raises(ValueError, match="blocks of"):
        backend.write([Move(0, 0, seal)], other)
    other.close()


def test_a_transfer_lets_go_of_the_arena(backend: KVBackendProtocol, rng: random.Random) -> None:
    own = HostArena(slots=2, block_bytes=BLOCK_BYTES)
    block = random_block(rng, BLOCK_BYTES)
    put(own, 0, block.data)
    assert backend.write([Move(0, 0, block.seal)], own) == [BlockStatus.OK]
    assert backend.read([Move(0, 1, block.seal)], own) == [BlockStatus.OK]
    own.close()


def test_closing_twice_is_closing_once(backend: KVBackendProtocol) -> None:
    backend.close()
    backend.close()
