import ctypes
import random
from collections.abc import Iterator

import pytest

from kvcontrol.kv_runtime import HostArena, Move
from kvcontrol.kv_runtime.backends.dma import OPERATION, HostSlots, Operations, Stack, operations
from kvcontrol.kv_runtime.backends.torch import TorchBackend
from tests.support.kv_blocks import get, pool_rows, put

BLOCKS = 20
POOLS = {
    "one pool": pool_rows((7, BLOCKS, 96)),
    "pages": pool_rows((7, BLOCKS, 24), pages=4),
    "two pools": pool_rows((3, BLOCKS, 160)) | pool_rows((2, BLOCKS, 96), name="1"),
    "single rows": pool_rows((1, BLOCKS, 480)) | pool_rows((1, BLOCKS, 192), name="1"),
}
BLOCK_BYTES = 672


def _run(copies: Operations) -> None:
    """Do what the device would, in memory that the process can reach."""
    for copy in copies:
        assert (copy["depth"], copy["source"]["type"], copy["target"]["type"]) == (1, 1, 1)
        for line in range(copy["height"]):
            ctypes.memmove(
                int(copy["target"]["address"] + line * copy["target"]["pitch"]),
                int(copy["source"]["address"] + line * copy["source"]["pitch"]),
                int(copy["width"]),
            )


@pytest.fixture
def arena() -> Iterator[HostArena]:
    made = HostArena(slots=BLOCKS, block_bytes=BLOCK_BYTES)
    rng = random.Random(4)  # noqa: S311 - reproducible, not secret
    for slot in range(BLOCKS):
        put(made, slot, rng.randbytes(BLOCK_BYTES))
    yield made
    made.close()


@pytest.fixture(params=list(POOLS))
def backend(request: pytest.FixtureRequest) -> TorchBackend:
    return TorchBackend(POOLS[request.param], pages=4 if request.param == "pages" else 1)


def _slots(arena: HostArena) -> list[bytes]:
    return [get(arena, slot) for slot in range(arena.slots)]


def _engine(backend: TorchBackend) -> list[bytes]:
    own = HostArena(slots=BLOCKS, block_bytes=BLOCK_BYTES)
    backend.read([Move(slot, slot) for slot in range(BLOCKS)], own)
    blocks = _slots(own)
    own.close()
    return blocks


@pytest.mark.parametrize("split", ["whole", "split"])
def test_the_copies_move_what_the_cpu_moves(backend: TorchBackend, arena: HostArena, split: str) -> None:
    stacks = list(backend.stacks)
    if split == "split":
        stacks = [row for stack in stacks for row in stack.split()]
    rng = random.Random(8)  # noqa: S311 - reproducible, not secret
    moves = [Move(*pair) for pair in zip(rng.sample(range(BLOCKS), 9), rng.sample(range(BLOCKS), 9), strict=True)]
    host = HostSlots(address=arena.address, pitch_bytes=arena.pitch_bytes)

    engine, slots = _engine(backend), _slots(arena)
    for slot, to, _ in moves:
        slots[to] = engine[slot]
    _run(operations(stacks, moves, host, to_host=True))
    assert _slots(arena) == slots

    fresh = rng.randbytes(BLOCK_BYTES)
    put(arena, 0, fresh)
    engine[BLOCKS - 1] = fresh
    _run(operations(stacks, [Move(BLOCKS - 1, 0)], host, to_host=False))
    assert _engine(backend) == engine


def test_one_pool_takes_one_copy_a_block() -> None:
    backend = TorchBackend(POOLS["one pool"])
    host = HostSlots(address=1 << 40, pitch_bytes=4096)
    assert len(operations(backend.stacks, [Move(n, n) for n in range(5)], host, to_host=True)) == 5


def test_addresses_beyond_4_gib_and_pitches_beyond_2_gib_are_kept() -> None:
    stack = Stack(address=1 << 46, rows=2, pitch_bytes=3 << 30, piece_bytes=1 << 17, offset_bytes=1 << 20)
    (copy,) = operations(
        [stack], [Move(20_000, 1 << 20)], HostSlots(address=1 << 45, pitch_bytes=1 << 22), to_host=False
    )
    assert copy["target"]["address"] == (1 << 46) + 20_000 * (1 << 17)
    assert copy["target"]["pitch"] == 3 << 30
    assert copy["source"]["address"] == (1 << 45) + (1 << 42) + (1 << 20)
    assert copy["source"]["pitch"] == 1 << 17


def test_an_operation_is_laid_out_as_cuda_has_it() -> None:
    offsets = {name: OPERATION.fields[name][1] for name in OPERATION.names}
    assert OPERATION.itemsize == 112
    assert offsets == {
        "source": 0,
        "target": 40,
        "width": 80,
        "height": 88,
        "depth": 96,
        "source_access_order": 104,
        "flags": 108,
    }
    operand = OPERATION["source"]
    assert {name: operand.fields[name][1] for name in operand.names} == {
        "type": 0,
        "_": 4,
        "address": 8,
        "pitch": 16,
        "height": 24,
        "location_type": 32,
        "location_id": 36,
    }
