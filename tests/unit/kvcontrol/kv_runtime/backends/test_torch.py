import sys
import threading
import time

import pytest
import torch

from kvcontrol.kv_runtime import BackendError, BlockStatus, HostArena, Move
from kvcontrol.kv_runtime.backends.cudart import CudaRuntime
from kvcontrol.kv_runtime.backends.torch import TorchBackend
from tests.support.kv_blocks import get, pool_rows


def test_the_rows_of_one_pool_are_one_stack() -> None:
    backend = TorchBackend(pool_rows((30, 16, 64)))
    assert [(stack.rows, stack.piece_bytes, stack.pitch_bytes) for stack in backend.stacks] == [(30, 64, 1024)]


def test_pages_of_a_block_are_one_piece() -> None:
    backend = TorchBackend(pool_rows((3, 16, 64), pages=4), pages=4)
    assert backend.capacity_blocks == 16
    assert [(stack.rows, stack.piece_bytes) for stack in backend.stacks] == [(3, 256)]


def test_pools_and_uneven_pitches_are_stacks_of_their_own() -> None:
    pool = torch.zeros((9, 16, 64), dtype=torch.uint8)
    other = torch.zeros((4, 16, 32), dtype=torch.uint8)
    rows = {"a": pool[0], "b": pool[1], "c": pool[4], "d": pool[7], "e": pool[2], "f": other[0], "g": other[1]}
    backend = TorchBackend(rows)
    assert [(stack.rows, stack.pitch_bytes) for stack in backend.stacks] == [(2, 1024), (2, 3072), (1, 1024), (2, 512)]
    assert [stack.offset_bytes for stack in backend.stacks] == [0, 128, 256, 320]
    assert backend.block_bytes == 5 * 64 + 2 * 32


def test_a_slot_is_the_rows_pieces_one_after_the_other() -> None:
    rows = pool_rows((3, 4, 8), pages=2) | pool_rows((2, 4, 6), pages=2, name="1")
    backend = TorchBackend(rows, pages=2)
    arena = HostArena(slots=2, block_bytes=backend.block_bytes)
    assert backend.read([Move(3, 1)], arena) == [BlockStatus.OK]
    assert get(arena, 1) == b"".join(bytes(row[6:8].flatten().tolist()) for row in rows.values())
    arena.close()


def test_memory_of_an_engine_in_inference_mode_can_be_written() -> None:
    with torch.inference_mode():
        rows = pool_rows((2, 4, 8))
    backend = TorchBackend(rows)
    arena = HostArena(slots=1, block_bytes=backend.block_bytes)
    assert backend.write([Move(2, 0)], arena) == [BlockStatus.OK]
    assert [row[2].tolist() for row in rows.values()] == [[0] * 8] * 2
    arena.close()


def test_work_on_a_cpu_is_done_when_it_is_fenced() -> None:
    assert TorchBackend(pool_rows((2, 4, 8))).fence().wait(0.0)


@pytest.mark.parametrize(
    ("rows", "pages", "words"),
    [
        ({}, 1, "0 KV rows"),
        (pool_rows((2, 4, 8)), 0, "0 pages a block"),
        (pool_rows((2, 5, 8)), 2, "multiple of the 2 pages"),
        ({"k": torch.zeros((4, 8))}, 1, r"KV row k is torch.float32, shape \(4, 8\); allowed are contiguous uint8"),
        ({"k": torch.zeros(8, dtype=torch.uint8)}, 1, "KV row k"),
        ({"k": torch.zeros((0, 8), dtype=torch.uint8)}, 1, "KV row k"),
        ({"k": torch.zeros((8, 4), dtype=torch.uint8).T}, 1, "KV row k"),
        (pool_rows((1, 4, 8)) | pool_rows((1, 5, 8), name="1"), 1, r"\[4, 5\] pages"),
        ({"k": torch.zeros((4, 8), dtype=torch.uint8, device="meta")}, 1, "on meta; allowed are: cpu, cuda"),
    ],
)
def test_rows_that_can_not_be_kv_memory_are_refused(rows: dict[str, torch.Tensor], pages: int, words: str) -> None:
    with pytest.raises(BackendError, match=words):
        TorchBackend(rows, pages=pages)


def test_a_transfer_lets_other_threads_run() -> None:
    backend = TorchBackend(pool_rows((16, 64, 1 << 18)))
    arena = HostArena(slots=64, block_bytes=backend.block_bytes)
    moves = [Move(slot, 63 - slot) for slot in range(64)]
    backend.read(moves, arena)  # touches the memory
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)  # lets go of the GIL

    other = threading.Thread(target=tick)
    before = sys.getswitchinterval()
    sys.setswitchinterval(600)  # nobody is made to give the GIL away: it changes hands where it is let go of
    try:
        other.start()
        start = time.perf_counter()
        backend.read(moves, arena)
        end = time.perf_counter()
    finally:
        sys.setswitchinterval(before)
        done.set()
        other.join(60)
    assert any(start < moment < end for moment in ticks)
    arena.close()


def test_a_torch_without_cuda_has_no_runtime_to_use() -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch has one")
    with pytest.raises(BackendError, match="no libcudart"):
        CudaRuntime.loaded()


def test_a_library_that_is_no_cuda_runtime_is_refused() -> None:
    with pytest.raises(BackendError, match="no usable CUDA runtime"):
        CudaRuntime("libc.so.6")
    with pytest.raises(BackendError, match="no usable CUDA runtime"):
        CudaRuntime("/nonexistent/libcudart.so")
