"""A process to be killed: it writes blocks without end, each made of its key, to ``file`` or ``arena`` at a path."""

import random
import sys
from pathlib import Path

from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime import BlockFileSpec, BlockRecord, BlockSeal, BlockStatus, HostArena, Move, checksum
from kvcontrol.kv_runtime.backends.file import FileBackend

SLOTS = 16
BLOCK_BYTES = 300_001


def spec_at(path: Path) -> BlockFileSpec:
    """Return what the process writes to."""
    return BlockFileSpec(path=path, slots=SLOTS, block_bytes=BLOCK_BYTES, identity=b"killed", lock_timeout_s=60.0)


def bytes_of(key: BlockHash) -> bytes:
    """Return the block that belongs to a key."""
    return random.Random(key).randbytes(BLOCK_BYTES)  # noqa: S311 - reproducible, not secret


def sealed(key: BlockHash) -> tuple[bytes, BlockSeal]:
    """Return a key's block with its seal."""
    data = bytes_of(key)
    return data, BlockSeal(BlockRecord(key=key, parent=None, tokens=key * 4, tenant="t"), checksum(data))


def _put(arena: HostArena, slot: int, data: bytes) -> None:
    with arena.view(slot) as view:
        view[:] = data


def _blocks(seed: int) -> list[tuple[bytes, BlockSeal]]:
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    return [sealed(BlockHash(rng.randbytes(16))) for _ in range(3 * SLOTS + 1)]


def _write_file(path: Path, seed: int) -> None:
    backend = FileBackend(spec_at(path))
    arena = HostArena(slots=1, block_bytes=BLOCK_BYTES)
    blocks = _blocks(seed)
    for turn in range(sys.maxsize):
        data, seal = blocks[turn % len(blocks)]
        _put(arena, 0, data)
        if backend.write([Move(turn % SLOTS, 0, seal)], arena) != [BlockStatus.OK]:
            raise RuntimeError(backend.last_error)
        if turn == SLOTS:
            print("full", flush=True)  # noqa: T201 - the test waits for it


def _write_arena(path: Path, seed: int) -> None:
    arena = HostArena.in_file(spec_at(path))
    blocks = _blocks(seed)
    for turn in range(sys.maxsize):
        data, seal = blocks[turn % len(blocks)]
        slot = turn % SLOTS
        arena.unseal(slot)
        _put(arena, slot, data)
        arena.seal(slot, seal)
        if turn == SLOTS:
            print("full", flush=True)  # noqa: T201 - the test waits for it


if __name__ == "__main__":
    {"file": _write_file, "arena": _write_arena}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
