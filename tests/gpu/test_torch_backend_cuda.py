"""Blocks of a CUDA engine, byte for byte, beside kernels that write and read them."""

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcontrol.kv_runtime import BlockFileSpec, BlockStatus, HostArena, Move
from kvcontrol.kv_runtime.backends.torch import TorchBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, BLOCKS, PIECE = 28, 512, 16_384
BLOCK_BYTES = ROWS * PIECE
MOST = 64
ROUNDS = 1_000
WAIT_S = 60.0


class Engine:
    """KV memory, patterns to fill it with, and a stream whose kernels take their time."""

    def __init__(self) -> None:
        self.pool = torch.randint(0, 256, (ROWS, BLOCKS, PIECE), dtype=torch.uint8, device="cuda")
        self.patterns = torch.randint(0, 256, (MOST, ROWS, PIECE), dtype=torch.uint8, device="cuda")
        self.patterns_host = self.patterns.cpu()
        self.stream = torch.cuda.Stream()
        self._factor = torch.rand((2048, 2048), device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()

    def work(self, turns: int) -> None:
        """Queue some 0.1 ms of kernels a turn on the current stream."""
        product = self._factor
        for _ in range(turns):
            product = (product @ self._factor).clamp(-1, 1)

    def write_patterns(self, blocks: list[int], number: int) -> None:
        """Queue kernels that change blocks, one after the other."""
        for index, block in enumerate(blocks):
            self.pool[:, block].copy_(self.patterns[index] ^ (number & 0xFF))

    def expected(self, index: int, number: int) -> torch.Tensor:
        """Return on the host what ``write_patterns`` makes of its ``index``-th block."""
        return self.patterns_host[index] ^ (number & 0xFF)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture
def backend(engine: Engine) -> Iterator[TorchBackend]:
    made = TorchBackend({f"row.{row}": engine.pool[row] for row in range(ROWS)})
    yield made
    made.close()


@pytest.fixture
def arena(backend: TorchBackend) -> Iterator[HostArena]:
    made = HostArena(slots=2 * MOST, block_bytes=BLOCK_BYTES)
    backend.pin(made)
    yield made
    made.close()


@pytest.fixture
def rng() -> random.Random:
    return random.Random(11)  # noqa: S311 - reproducible, not secret


def _slot(arena: HostArena, slot: int) -> torch.Tensor:
    with arena.view(slot) as view:
        return torch.frombuffer(bytearray(view), dtype=torch.uint8).view(ROWS, PIECE)


def _put(arena: HostArena, slot: int, data: torch.Tensor) -> None:
    with arena.view(slot) as view:
        torch.frombuffer(view, dtype=torch.uint8).copy_(data.flatten())


def test_what_a_kernel_wrote_is_what_is_saved(
    engine: Engine, backend: TorchBackend, arena: HostArena, rng: random.Random
) -> None:
    for number in range(ROUNDS):
        count = rng.choice((1, 1, 2, 3, 5, 8, 16, MOST))
        blocks, slots = rng.sample(range(BLOCKS), count), rng.sample(range(arena.slots), count)
        with torch.cuda.stream(engine.stream):
            engine.work(rng.randrange(8))
            engine.write_patterns(blocks, number)
            fence = backend.fence()
            engine.work(rng.randrange(4))
        assert fence.wait(WAIT_S)
        moves = [Move(block, slot) for block, slot in zip(blocks, slots, strict=True)]
        assert backend.read(moves, arena) == [BlockStatus.OK] * count, backend.last_error
        for index, slot in enumerate(slots):
            assert torch.equal(_slot(arena, slot), engine.expected(index, number)), f"round {number}, block {index}"


def test_a_load_waits_for_the_kernels_that_still_read_and_touches_nothing_else(
    engine: Engine, backend: TorchBackend, arena: HostArena, rng: random.Random
) -> None:
    mirror = engine.pool.clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for number in range(ROUNDS):
        count = rng.choice((1, 1, 2, 3, 5, 8, 16, MOST))
        blocks, slots = rng.sample(range(BLOCKS), count), rng.sample(range(arena.slots), count)
        ids = torch.tensor(blocks, device="cuda")
        for index, slot in enumerate(slots):
            _put(arena, slot, engine.expected(index, number))
        torch.cuda.synchronize()
        with torch.cuda.stream(engine.stream):
            engine.work(rng.randrange(8))
            wrong += (engine.pool[:, ids] != mirror[:, ids]).sum()  # the last use of what the blocks held before
            fence = backend.fence()
            engine.work(4)  # goes on while the blocks change
        assert fence.wait(WAIT_S)
        moves = [Move(block, slot) for block, slot in zip(blocks, slots, strict=True)]
        assert backend.write(moves, arena) == [BlockStatus.OK] * count, backend.last_error
        with torch.cuda.stream(engine.stream):
            for index, block in enumerate(blocks):
                mirror[:, block].copy_(engine.patterns[index] ^ (number & 0xFF))
            wrong += (engine.pool[:, ids] != mirror[:, ids]).sum()
    torch.cuda.synchronize()
    assert int(wrong) == 0
    assert torch.equal(engine.pool, mirror)


def test_both_directions_and_several_threads_at_once(engine: Engine, backend: TorchBackend, arena: HostArena) -> None:
    failures: list[str] = []

    def worker(mine: int) -> None:
        own = random.Random(mine)  # noqa: S311 - reproducible, not secret
        blocks, slots = range(mine, BLOCKS, 4), range(mine, arena.slots, 4)
        for _ in range(100):
            count = own.randint(1, 16)
            out, back = own.sample(slots, count), own.sample(slots, count)
            chosen = own.sample(blocks, count)
            data = [torch.randint(0, 256, (ROWS, PIECE), dtype=torch.uint8) for _ in chosen]
            for slot, piece in zip(out, data, strict=True):
                _put(arena, slot, piece)
            statuses = backend.write([Move(b, s) for b, s in zip(chosen, out, strict=True)], arena)
            statuses += backend.read([Move(b, s) for b, s in zip(chosen, back, strict=True)], arena)
            if statuses != [BlockStatus.OK] * (2 * count):
                failures.append(backend.last_error)
            failures.extend("bytes" for s, d in zip(back, data, strict=True) if not torch.equal(_slot(arena, s), d))

    threads = [threading.Thread(target=worker, args=(mine,), daemon=True) for mine in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        engine.work(1)
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert failures == []


@pytest.mark.parametrize("way", ["one call a block", "a copy a row", "one call a row"])
def test_the_other_ways_to_copy_move_the_same_bytes(
    engine: Engine, backend: TorchBackend, arena: HostArena, rng: random.Random, way: str
) -> None:
    copier = backend._copier
    if way != "a copy a row":
        copier._cuda.batches = False
    if way != "one call a block":
        copier._stacks = [row for stack in copier._stacks for row in stack.split()]
    torch.cuda.synchronize()
    blocks, slots = rng.sample(range(BLOCKS), MOST), rng.sample(range(arena.slots), MOST)
    moves = [Move(block, slot) for block, slot in zip(blocks, slots, strict=True)]
    assert backend.read(moves, arena) == [BlockStatus.OK] * MOST, backend.last_error
    assert all(torch.equal(_slot(arena, s), engine.pool[:, b].cpu()) for b, s, _ in moves)
    fresh = torch.randint(0, 256, (MOST, ROWS, PIECE), dtype=torch.uint8)
    for index, slot in enumerate(slots):
        _put(arena, slot, fresh[index])
    assert backend.write(moves, arena) == [BlockStatus.OK] * MOST, backend.last_error
    assert all(torch.equal(fresh[index], engine.pool[:, block].cpu()) for index, block in enumerate(blocks))


def test_memory_that_is_not_pinned_is_copied_right_too(
    engine: Engine, backend: TorchBackend, rng: random.Random
) -> None:
    own = HostArena(slots=8, block_bytes=BLOCK_BYTES)
    torch.cuda.synchronize()
    moves = [Move(block, slot) for slot, block in enumerate(rng.sample(range(BLOCKS), 8))]
    assert backend.read(moves, own) == [BlockStatus.OK] * 8, backend.last_error
    assert all(torch.equal(_slot(own, s), engine.pool[:, b].cpu()) for b, s, _ in moves)
    _put(own, 0, engine.patterns_host[0])
    assert backend.write([Move(1, 0)], own) == [BlockStatus.OK], backend.last_error
    assert torch.equal(engine.pool[:, 1].cpu(), engine.patterns_host[0])
    own.close()


def test_a_fence_passes_when_its_work_is_done_and_not_before(engine: Engine, backend: TorchBackend) -> None:
    with torch.cuda.stream(engine.stream):
        torch.cuda._sleep(2_000_000_000)  # clock cycles: about a second
        fence = backend.fence()
    assert not fence.wait(0.01)
    assert fence.wait(WAIT_S)
    assert fence.wait(0.0)


def test_shared_memory_can_be_pinned_and_pinned_again(backend: TorchBackend, engine: Engine) -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no /dev/shm here")
    path = folder / f"kvgate-test-{random.SystemRandom().randrange(1 << 40):x}"
    spec = BlockFileSpec(path=path, slots=16, block_bytes=BLOCK_BYTES, identity=b"gpu")
    try:
        for _ in range(2):
            shared = HostArena.in_file(spec)
            backend.pin(shared)
            assert backend.read([Move(5, 3)], shared) == [BlockStatus.OK], backend.last_error
            assert torch.equal(_slot(shared, 3), engine.pool[:, 5].cpu())
            shared.close()
    finally:
        path.unlink(missing_ok=True)


def test_graphs_are_captured_beside_transfers(engine: Engine, backend: TorchBackend, arena: HostArena) -> None:
    failures: list[str] = []
    stop = threading.Event()
    fences = [backend.fence()]

    def transfer() -> None:
        while not stop.is_set():
            moves = [Move(block, block) for block in range(32)]
            if not fences[-1].wait(WAIT_S):
                failures.append("fence")
            if (
                backend.read(moves, arena) != [BlockStatus.OK] * 32
                or backend.write(moves, arena) != [BlockStatus.OK] * 32
            ):
                failures.append(backend.last_error)

    engine.work(2)  # warms the kernels up
    torch.cuda.synchronize()
    other = threading.Thread(target=transfer, daemon=True)
    other.start()
    try:
        for _ in range(30):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                engine.work(4)
            graph.replay()
            fences.append(backend.fence())
    finally:
        stop.set()
        other.join(120)
    torch.cuda.synchronize()
    assert not other.is_alive()
    assert failures == []


def test_an_error_of_cuda_is_a_status_and_the_next_transfer_works(backend: TorchBackend, arena: HostArena) -> None:
    copier = backend._copier
    copier._cuda.batches = False  # single copies are known to refuse a pitch below their width
    good = copier._stacks
    copier._stacks = [replace(stack, pitch_bytes=1) for stack in good]
    assert backend.read([Move(0, 0), Move(1, 1)], arena) == [BlockStatus.FAILED] * 2
    assert "CUDA error" in backend.last_error
    copier._stacks = good
    assert backend.read([Move(0, 0)], arena) == [BlockStatus.OK]


def test_what_is_queued_and_joined_is_what_kernels_find_though_nobody_waited(
    engine: Engine, backend: TorchBackend, arena: HostArena, rng: random.Random
) -> None:
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    known = torch.zeros((MOST, ROWS, PIECE), dtype=torch.uint8, device="cuda")
    for number in range(ROUNDS):
        count = rng.choice((1, 2, 5, 16, MOST))
        blocks, slots = rng.sample(range(BLOCKS), count), rng.sample(range(arena.slots), count)
        ids = torch.tensor(blocks, device="cuda")
        for index, slot in enumerate(slots):
            _put(arena, slot, engine.expected(index, number))
            known[index].copy_(engine.patterns[index] ^ (number & 0xFF))
        torch.cuda.synchronize()
        moves = [Move(block, slot) for block, slot in zip(blocks, slots, strict=True)]
        told, statuses = threading.Event(), []

        def load(moves: list[Move] = moves, told: threading.Event = told, ends: list[BlockStatus] = statuses) -> None:
            ends += backend.write_in_order(moves, arena, told.set)

        loader = threading.Thread(target=load, daemon=True)
        loader.start()
        assert told.wait(WAIT_S)
        with torch.cuda.stream(engine.stream):
            backend.join()
            wrong += (engine.pool[:, ids].transpose(0, 1) != known[:count]).sum()
        loader.join(WAIT_S)
        assert statuses == [BlockStatus.OK] * count, backend.last_error
        torch.cuda.synchronize()
    assert int(wrong) == 0


def test_nothing_is_told_of_a_transfer_that_the_device_refused(backend: TorchBackend, arena: HostArena) -> None:
    copier = backend._copier
    copier._cuda.batches = False
    copier._stacks = [replace(stack, pitch_bytes=1) for stack in copier._stacks]
    told: list[int] = []
    assert backend.write_in_order([Move(0, 0)], arena, lambda: told.append(1)) == [BlockStatus.FAILED]
    assert told == []


def test_a_fence_with_grace_passes_later(engine: Engine, backend: TorchBackend) -> None:
    with torch.cuda.stream(engine.stream):
        fence = backend.fence(grace_s=0.2)
    torch.cuda.synchronize()
    assert not fence.wait(0.02)
    assert fence.wait(WAIT_S)
    assert fence.wait(0.0)
