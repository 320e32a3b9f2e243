import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvcontrol.kv_runtime import ArenaError, BlockFileSpec, BlockStatus, HostArena, Move, Recovered, checksum
from kvcontrol.kv_runtime.backends.torch import TorchBackend
from kvcontrol.kv_runtime.header import PAGE_BYTES, header_bytes_for
from tests.support import block_writer
from tests.support.killed import write_and_kill
from tests.support.kv_blocks import get, pool_rows, put, random_block
from tests.support.small_disk import small_disk

BLOCK_BYTES = 5000


@pytest.fixture(params=[64, 4096], ids=["blocks of 64 tokens", "blocks of 4096 tokens"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> BlockFileSpec:
    return BlockFileSpec(
        path=tmp_path / "arena",
        slots=6,
        block_bytes=BLOCK_BYTES,
        identity=b"model",
        header_bytes=header_bytes_for(request.param),
        lock_timeout_s=0.0,
    )


@pytest.fixture(params=["own", "file"])
def arena(request: pytest.FixtureRequest, spec: BlockFileSpec) -> Iterator[HostArena]:
    made = HostArena.in_file(spec) if request.param == "file" else HostArena(slots=6, block_bytes=BLOCK_BYTES)
    yield made
    made.close()


@pytest.fixture
def rng() -> random.Random:
    return random.Random(3)  # noqa: S311 - reproducible, not secret


def test_slots_are_apart_and_keep_their_bytes(arena: HostArena, rng: random.Random) -> None:
    blocks = [rng.randbytes(BLOCK_BYTES) for _ in range(6)]
    for slot, data in enumerate(blocks):
        put(arena, slot, data)
    assert [get(arena, slot) for slot in range(6)] == blocks


def test_slots_begin_at_pages(arena: HostArena) -> None:
    assert arena.address % PAGE_BYTES == 0
    assert arena.pitch_bytes % PAGE_BYTES == 0
    with arena.pages(5) as pages:
        assert len(pages) == 2 * PAGE_BYTES


def test_native_code_finds_slot_n_at_n_pitches(arena: HostArena, rng: random.Random) -> None:
    data = rng.randbytes(BLOCK_BYTES)
    put(arena, 4, data)
    with arena.whole() as whole:
        assert whole[4 * arena.pitch_bytes :][:BLOCK_BYTES] == data


@pytest.mark.parametrize("slot", [-1, 6])
def test_a_slot_outside_is_an_error(arena: HostArena, slot: int, rng: random.Random) -> None:
    seal = random_block(rng, BLOCK_BYTES).seal
    for call in (arena.view, arena.pages, arena.unseal, lambda n: arena.seal(n, seal)):
        with pytest.raises(IndexError, match="of an arena with 6"):
            call(slot)


def test_memory_in_use_is_not_given_back(arena: HostArena) -> None:
    view = arena.view(0)
    with pytest.raises(BufferError):
        arena.close()
    view.release()
    arena.close()
    arena.close()


def test_devices_are_told_before_the_memory_goes(arena: HostArena) -> None:
    told: list[int] = []
    arena.on_close(lambda: told.append(len(arena.whole()) > 0))
    arena.close()
    arena.close()
    assert told == [True]


def test_own_memory_is_not_found_again(rng: random.Random) -> None:
    arena = HostArena(slots=2, block_bytes=BLOCK_BYTES)
    arena.seal(0, random_block(rng, BLOCK_BYTES).seal)
    assert not arena.durable
    assert arena.recover() == []
    arena.close()


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (1 << 40, 1 << 20)])
def test_memory_that_can_not_be_had_is_an_error(size: tuple[int, int]) -> None:
    with pytest.raises(ArenaError, match=r"must be > 0|can't be had"):
        HostArena(slots=size[0], block_bytes=size[1])


def test_sealed_blocks_are_found_again_and_others_are_not(spec: BlockFileSpec, rng: random.Random) -> None:
    arena = HostArena.in_file(spec)
    assert arena.durable
    assert arena.recover() == []
    blocks = [random_block(rng, BLOCK_BYTES) for _ in range(6)]
    for slot, block in enumerate(blocks):
        put(arena, slot, block.data)
        if slot != 2:
            arena.seal(slot, block.seal)
    arena.unseal(4)
    arena.close()
    arena = HostArena.in_file(spec)
    assert arena.recover() == [Recovered(slot, blocks[slot].seal) for slot in (0, 1, 3, 5)]
    assert [get(arena, slot) for slot in (0, 1, 3, 5)] == [blocks[slot].data for slot in (0, 1, 3, 5)]
    arena.close()


def test_a_slot_that_a_backend_reads_into_is_unsealed(spec: BlockFileSpec, rng: random.Random) -> None:
    engine = TorchBackend(pool_rows((5, 4, 1000)))
    arena = HostArena.in_file(spec)
    for slot in (1, 3):
        arena.seal(slot, random_block(rng, BLOCK_BYTES).seal)
    assert engine.read([Move(0, 3)], arena) == [BlockStatus.OK]
    arena.close()
    arena = HostArena.in_file(spec)
    assert [found.slot for found in arena.recover()] == [1]
    arena.close()


@pytest.mark.parametrize("slots", [3, 50])
def test_another_number_of_slots_keeps_what_still_has_a_place(
    spec: BlockFileSpec, rng: random.Random, slots: int
) -> None:
    arena = HostArena.in_file(spec)
    for slot in range(6):
        arena.seal(slot, random_block(rng, BLOCK_BYTES).seal)
    arena.close()
    arena = HostArena.in_file(replace(spec, slots=slots))
    assert [found.slot for found in arena.recover()] == list(range(min(slots, 6)))
    arena.close()


def test_two_never_share_a_file(spec: BlockFileSpec) -> None:
    arena = HostArena.in_file(spec)
    with pytest.raises(ArenaError, match="in use by another process"):
        HostArena.in_file(spec)
    arena.close()


def test_the_blocks_of_another_model_are_refused(spec: BlockFileSpec) -> None:
    HostArena.in_file(spec).close()
    with pytest.raises(ArenaError, match="another model"):
        HostArena.in_file(replace(spec, identity=b"other"))


def test_a_thin_file_is_refused(spec: BlockFileSpec) -> None:
    with pytest.raises(ArenaError, match="preallocated"):
        HostArena.in_file(replace(spec, preallocate=False))


def test_shared_memory_that_is_too_small_is_an_error_at_the_start(spec: BlockFileSpec, tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", size_bytes=1 << 20) as shm, pytest.raises(ArenaError, match="are free"):
        HostArena.in_file(replace(spec, path=shm / "arena", slots=1000))


@pytest.mark.parametrize("seed", range(4))
def test_after_a_kill_every_block_that_is_found_is_whole(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "arena"
    for life in range(2):
        write_and_kill("arena", path, seed=10 * seed + life)
        arena = HostArena.in_file(block_writer.spec_at(path))
        found = arena.recover()
        assert len(found) >= block_writer.SLOTS - 1
        for slot, seal in found:
            data = get(arena, slot)
            assert checksum(data) == seal.checksum
            assert data == block_writer.bytes_of(seal.record.key)
        arena.close()
