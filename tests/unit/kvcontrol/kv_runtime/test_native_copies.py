"""The native helper's copies of verified blocks, with a copy function of our own in the place of CUDA's."""

import ctypes
import random
import shutil
from array import array
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
import torch

from kvcontrol.kv_runtime import HostArena, checksum
from kvcontrol.kv_runtime.backends.torch import TorchBackend
from kvcontrol.kv_runtime.native import native

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")), reason="needs a C compiler"
)

ROWS, BLOCKS, PIECE = 3, 8, 40
_QUEUED, _CORRUPT, _REFUSED = 0, 1, 2
_NO_SUCH_DEVICE = 101
_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)


class Copies:
    """Blocks of an arena to an engine's memory on a CPU; ``refuse_from`` is the copy that a device says no to."""

    def __init__(self) -> None:
        self.pool = torch.zeros((ROWS, BLOCKS, PIECE), dtype=torch.uint8)
        other = torch.zeros((BLOCKS, PIECE), dtype=torch.uint8)
        rows = {f"row.{row}": self.pool[row] for row in range(ROWS)} | {"other": other}
        self.backend = TorchBackend(rows)
        self.other = other
        self.arena = HostArena(slots=BLOCKS, block_bytes=self.backend.block_bytes)
        rng = random.Random(2)  # noqa: S311 - reproducible, not secret
        for slot in range(BLOCKS):
            self.arena.view(slot)[:] = rng.randbytes(self.arena.block_bytes)
        self.refuse_from: int | None = None
        self.copied = 0

    def _copy(  # noqa: PLR0913, PLR0917 - CUDA's
        self, target: int, pitch: int, source: int, source_pitch: int, width: int, height: int, *_: object
    ) -> int:
        if self.refuse_from is not None and self.copied >= self.refuse_from:
            return _NO_SUCH_DEVICE
        self.copied += 1
        for row in range(height):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, width)
        return 0

    def run(self, moves: list[tuple[int, int]], sums: list[int]) -> tuple[int, list[int]]:
        function = _COPY(self._copy)
        stacks = array("Q")
        for stack in self.backend.stacks:
            stacks.extend((stack.address, stack.rows, stack.pitch_bytes, stack.piece_bytes, stack.offset_bytes))
        slots = array("Q", [slot for slot, _ in moves])
        offsets = array("Q", [host * self.arena.pitch_bytes for _, host in moves])
        expected, ends = array("Q", sums), (ctypes.c_ubyte * len(moves))(*[9] * len(moves))
        helper = native()
        code = helper.verified_copies(
            *(helper.hash, ctypes.cast(function, ctypes.c_void_p), None, stacks.buffer_info()[0], len(stacks) // 5),
            *(self.arena.address, offsets.buffer_info()[0], slots.buffer_info()[0], expected.buffer_info()[0]),
            *(len(moves), self.arena.block_bytes, ctypes.addressof(ends)),
        )
        return code, list(ends)

    def sums(self, moves: list[tuple[int, int]]) -> list[int]:
        return [checksum(self.arena.view(host)) for _, host in moves]

    def block(self, slot: int) -> bytes:
        return bytes(self.pool[:, slot].flatten().tolist()) + bytes(self.other[slot].tolist())


@pytest.fixture
def copies() -> Iterator[Copies]:
    made = Copies()
    yield made
    made.arena.close()


def test_blocks_with_their_checksum_are_copied_and_no_others(copies: Copies) -> None:
    moves = [(5, 0), (1, 7), (3, 2)]
    sums = copies.sums(moves)
    sums[1] ^= 1
    assert copies.run(moves, sums) == (0, [_QUEUED, _CORRUPT, _QUEUED])
    assert copies.block(5) == bytes(copies.arena.view(0))
    assert copies.block(3) == bytes(copies.arena.view(2))
    for untouched in (0, 1, 2, 4, 6, 7):
        assert copies.block(untouched) == bytes(copies.arena.block_bytes)


def test_what_a_device_refuses_is_told_and_nothing_more_is_asked_of_it(copies: Copies) -> None:
    moves = [(slot, slot) for slot in range(4)]
    copies.refuse_from = 3  # two copies a block: the second block's second
    assert copies.run(moves, copies.sums(moves)) == (_NO_SUCH_DEVICE, [_QUEUED, _REFUSED, _REFUSED, _REFUSED])
    assert copies.copied == 3


def test_nothing_to_do_is_done(copies: Copies) -> None:
    assert copies.run([], []) == (0, [])
