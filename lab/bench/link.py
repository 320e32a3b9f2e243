"""The link between an engine's memory and the host, and the share of it that transfers of KV blocks reach.

The ceiling is measured first, in the same run: copies of one large piece between pinned host memory and the device (on
a CPU: within memory), in each direction and in both at once. Then random blocks move to and from random slots, and
``busy`` says the same again beside a thread that never stops running Python, as an engine loop that polls does.

    python -m lab.bench.link [cpu|cuda]

prints one JSON object. Bandwidths are 10**9 bytes a second, medians of ``repeats``, with all that a transfer takes.
"""

import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Move
from kvcontrol.kv_runtime.backends.torch import TorchBackend

_GIGA = 1e9
_WAIT_S = 600.0

_Transfer = Callable[[Sequence[Move], HostArena], list[BlockStatus]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """The engine's memory to move, and how often. The default is the shape of a 7B model with blocks of 64 tokens."""

    device: str = "cuda"
    rows: int = 28
    piece_bytes: int = 131_072
    blocks: int = 2_304
    sizes: Sequence[int] = (1, 4, 16, 64, 255, 1024)
    ceiling_bytes: int = 1 << 30
    repeats: int = 9
    seed: int = 0

    @property
    def block_bytes(self) -> int:
        """One block in all rows."""
        return self.rows * self.piece_bytes


def small(device: str = "cpu") -> LinkPlan:
    """Return a plan for a machine without a GPU to spare: 0.3 GB of memory, some seconds."""
    return LinkPlan(
        device=device,
        rows=12,
        piece_bytes=32_768,
        blocks=288,
        sizes=(1, 4, 16, 64, 255),
        ceiling_bytes=1 << 27,
        repeats=5,
    )


def run(plan: LinkPlan) -> dict[str, float]:
    """Return metrics by name, with their unit in it.

    Raises ``RuntimeError`` when a transfer fails or moves wrong bytes.
    """
    pool = torch.randint(0, 256, (plan.rows, plan.blocks, plan.piece_bytes), dtype=torch.uint8, device=plan.device)
    backend = TorchBackend({f"row.{row}": pool[row] for row in range(plan.rows)})
    arena = HostArena(slots=2 * max(plan.sizes), block_bytes=plan.block_bytes)
    try:
        with arena.whole() as memory:
            torch.frombuffer(memory, dtype=torch.uint8).fill_(1)  # so that no page is new to the transfers
        backend.pin(arena)
        backend.fence().wait(_WAIT_S)  # the pool is filled
        metrics = _ceilings(plan)
        metrics |= _transfers(plan, backend, arena, metrics)
        _verify(plan, backend, arena)
    finally:
        arena.close()
    return metrics


def _ceilings(plan: LinkPlan) -> dict[str, float]:
    size = plan.ceiling_bytes
    pinned = plan.device != "cpu"
    host = [torch.ones(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    device = [torch.ones(size, dtype=torch.uint8, device=plan.device) for _ in range(2)]
    if plan.device == "cpu":
        runs: dict[str, Callable[[], object]] = {
            "d2h": lambda: host[0].copy_(device[0]),
            "h2d": lambda: device[1].copy_(host[1]),
        }
        runs["both"] = lambda: _together([runs["d2h"], runs["h2d"]])
    else:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]

        def queue(index: int) -> None:
            with torch.cuda.stream(streams[index]):
                target, source = (host[0], device[0]) if index == 0 else (device[1], host[1])
                target.copy_(source, non_blocking=True)

        def wait(*indices: int) -> None:
            for index in indices:
                queue(index)
            for index in indices:
                streams[index].synchronize()

        runs = {"d2h": lambda: wait(0), "h2d": lambda: wait(1), "both": lambda: wait(0, 1)}
    moved = {"d2h": size, "h2d": size, "both": 2 * size}
    return {f"ceiling_{name}_gbps": moved[name] / _median_s(plan, act) / _GIGA for name, act in runs.items()}


def _transfers(plan: LinkPlan, backend: TorchBackend, arena: HostArena, ceiling: dict[str, float]) -> dict[str, float]:
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    ways = {"d2h": backend.read, "h2d": backend.write}
    metrics: dict[str, float] = {}

    def note(name: str, way: str, blocks: int, spent_s: float) -> None:
        gbps = blocks * plan.block_bytes / spent_s / _GIGA
        metrics[f"{name}_ms"] = spent_s * 1e3
        metrics[f"{name}_gbps"] = gbps
        metrics[f"{name}_share_pct"] = 100 * gbps / ceiling[f"ceiling_{way}_gbps"]

    for size in plan.sizes:
        for way, move in ways.items():
            moves = _moves(plan, arena, size, rng)
            note(f"{way}_{size}", way, size, _median_s(plan, partial(_moved, backend, move, moves, arena)))
    largest = max(plan.sizes)
    half = min(largest, plan.blocks // 2)
    moves = _moves(plan, arena, 2 * half, rng)
    acts = [
        partial(_moved, backend, backend.read, moves[:half], arena),
        partial(_moved, backend, backend.write, moves[half:], arena),
    ]
    note(f"both_{half}", "both", 2 * half, _median_s(plan, lambda: _together(acts)))
    busy = min(255, largest)
    for way, move in ways.items():
        moves = _moves(plan, arena, busy, rng)
        spent_s = _beside_python(plan, partial(_moved, backend, move, moves, arena))
        note(f"{way}_{busy}_busy", way, busy, spent_s)
    return metrics


def _moves(plan: LinkPlan, arena: HostArena, count: int, rng: random.Random) -> list[Move]:
    slots, hosts = rng.sample(range(plan.blocks), count), rng.sample(range(arena.slots), count)
    return [Move(slot, host) for slot, host in zip(slots, hosts, strict=True)]


def _verify(plan: LinkPlan, backend: TorchBackend, arena: HostArena) -> None:
    """What was written to the engine is what is read from it."""
    rng = random.Random(plan.seed)  # noqa: S311 - reproducible, not secret
    for slot in rng.sample(range(plan.blocks), 8):
        data = rng.randbytes(plan.block_bytes)
        with arena.view(0) as view:
            view[:] = data
        _moved(backend, backend.write, [Move(slot, 0)], arena)
        _moved(backend, backend.read, [Move(slot, 1)], arena)
        with arena.view(1) as view:
            if view != data:
                raise RuntimeError(f"block {slot} came back with other bytes")


def _moved(backend: TorchBackend, move: _Transfer, moves: Sequence[Move], arena: HostArena) -> None:
    if any(status is not BlockStatus.OK for status in move(moves, arena)):
        raise RuntimeError(backend.last_error)


def _median_s(plan: LinkPlan, act: Callable[[], object]) -> float:
    act()
    spent = []
    for _ in range(plan.repeats):
        start = time.perf_counter()
        act()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def _together(acts: Sequence[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(acts)) as threads:
        for act in [threads.submit(act) for act in acts]:
            act.result(_WAIT_S)


def _beside_python(plan: LinkPlan, act: Callable[[], object]) -> float:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    spinner = threading.Thread(target=spin, daemon=True)
    spinner.start()
    try:
        return _median_s(plan, act)
    finally:
        stop.set()
        spinner.join(_WAIT_S)


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    result = run(small() if chosen == "cpu" else LinkPlan(device=chosen))
    sys.stdout.write(json.dumps({name: round(value, 3) for name, value in result.items()}, indent=1) + "\n")
