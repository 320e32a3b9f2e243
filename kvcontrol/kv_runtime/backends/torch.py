"""The engine's own KV memory, on a CPU or a CUDA device.

An engine keeps a block as pieces, one in each *row* (a layer's keys and values): ``pages`` neighbouring pages of a
uint8 tensor ``[num_blocks * pages, page_bytes]``. In the arena the pieces lie one after the other. Rows that are cut
from one pool follow each other at a constant pitch, so that all pieces of a block are one strided copy (a *stack*).

Python can't drive such copies beside an engine loop that polls: each return into the interpreter waits for the GIL, and
255 blocks of 3.7 MB took seconds where the link needs 18 ms. Therefore a transfer is one native call that has let go
of the GIL, whatever the number of blocks (``_foreach_copy_`` here, a batch of strided DMA on CUDA).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Fence, Move
from kvcontrol.kv_runtime.errors import BackendError

_ROW_DIMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStack:
    """``rows`` rows at one pitch: ``view`` is ``[rows, blocks, piece_bytes]`` of the engine's memory.

    ``offset_bytes`` is where its pieces begin in an arena slot.
    """

    view: torch.Tensor
    rows: int
    pitch_bytes: int
    piece_bytes: int
    offset_bytes: int

    @property
    def address(self) -> int:
        """Where block 0 of the first row lies."""
        return int(self.view.data_ptr())


class PassedFence:
    """The fence of an engine that works while it is called, as on a CPU: what it was asked for is done."""

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - there is nothing to wait for
        """See ``Fence``."""
        return True


class TorchBackend:
    """The KV memory behind ``rows`` (by name, in the order in which a block's pieces are stored), in host memory.

    All rows are uint8, contiguous, on one device, with the same number of blocks; raises ``BackendError`` when not.
    The tensors' memory must outlive the backend.
    """

    tier = CacheTier.HBM

    def __init__(self, rows: Mapping[str, torch.Tensor], *, pages: int = 1) -> None:
        self.capacity_blocks = _blocks_of(rows, pages)
        self.stacks = _stacked(list(rows.values()), self.capacity_blocks)
        self.block_bytes = sum(stack.rows * stack.piece_bytes for stack in self.stacks)
        self.last_error = ""
        device = next(iter(rows.values())).device
        if device.type != "cpu":
            raise BackendError(f"the KV rows are on {device}; allowed is: cpu")

    def fence(self) -> Fence:
        """See ``EngineBackendProtocol``."""
        return PassedFence()

    def pin(self, arena: HostArena) -> None:
        """Prepare an arena for fast transfers; there is nothing to do on a CPU."""

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        self._check(moves, arena)
        for move in moves:
            arena.unseal(move.host)
        return self._copy(moves, arena, to_host=True)

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        self._check(moves, arena)
        return self._copy(moves, arena, to_host=False)

    def close(self) -> None:
        """See ``KVBackendProtocol``."""
        self.stacks = ()
        self.capacity_blocks = 0

    def _check(self, moves: Sequence[Move], arena: HostArena) -> None:
        if arena.block_bytes != self.block_bytes:
            raise ValueError(f"an arena with blocks of {arena.block_bytes} bytes, here {self.block_bytes}")
        for move in moves:
            if not 0 <= move.slot < self.capacity_blocks:
                raise IndexError(f"block {move.slot} of an engine with {self.capacity_blocks}")
            if not 0 <= move.host < arena.slots:
                raise IndexError(f"slot {move.host} of an arena with {arena.slots}")

    def _copy(self, moves: Sequence[Move], arena: HostArena, *, to_host: bool) -> list[BlockStatus]:
        if not moves:
            return []
        with torch.inference_mode(), arena.whole() as memory:
            host = torch.frombuffer(memory, dtype=torch.uint8)
            inside, outside = [], []
            for stack in self.stacks:
                shape, strides = (stack.rows, stack.piece_bytes), (stack.piece_bytes, 1)
                for move in moves:
                    start = move.host * arena.pitch_bytes + stack.offset_bytes
                    outside.append(host.as_strided(shape, strides, start))
                    inside.append(stack.view[:, move.slot])
            targets, sources = (outside, inside) if to_host else (inside, outside)
            torch._foreach_copy_(targets, sources)
        return [BlockStatus.OK] * len(moves)


def _blocks_of(rows: Mapping[str, torch.Tensor], pages: int) -> int:
    """Return how many blocks all rows have; raises ``BackendError`` for rows that can't be KV memory."""
    if not rows or pages <= 0:
        raise BackendError(f"{len(rows)} KV rows with {pages} pages a block; both must be > 0")
    lengths = set()
    devices = set()
    for name, row in rows.items():
        if row.dtype != torch.uint8 or row.dim() != _ROW_DIMS or not row.is_contiguous() or row.numel() == 0:
            raise BackendError(
                f"KV row {name} is {row.dtype}, shape {tuple(row.shape)}; allowed are contiguous uint8 tensors "
                "[pages, page_bytes]"
            )
        lengths.add(row.shape[0])
        devices.add(row.device)
    if len(lengths) > 1 or len(devices) > 1:
        raise BackendError(f"KV rows of {sorted(lengths)} pages on {sorted(map(str, devices))}; all must be alike")
    (length,) = lengths
    if length % pages:
        raise BackendError(f"KV rows of {length} pages; it must be a multiple of the {pages} pages of a block")
    return int(length) // pages


def _stacked(rows: Sequence[torch.Tensor], blocks: int) -> tuple[RowStack, ...]:
    """Join neighbours that lie at one pitch in one storage."""
    stacks = []
    offset = 0
    for run in _runs(rows):
        first = run[0]
        piece_bytes = first.numel() // blocks
        pitch_bytes = run[1].data_ptr() - first.data_ptr() if len(run) > 1 else blocks * piece_bytes
        view = first.as_strided((len(run), blocks, piece_bytes), (pitch_bytes, piece_bytes, 1))
        stacks.append(
            RowStack(view=view, rows=len(run), pitch_bytes=pitch_bytes, piece_bytes=piece_bytes, offset_bytes=offset)
        )
        offset += len(run) * piece_bytes
    return tuple(stacks)


def _runs(rows: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    run = [rows[0]]
    for row in rows[1:]:
        step = row.data_ptr() - run[-1].data_ptr()
        joins = (
            row.shape == run[0].shape
            and row.untyped_storage().data_ptr() == run[0].untyped_storage().data_ptr()
            and step >= row.numel()
            and (len(run) == 1 or step == run[1].data_ptr() - run[0].data_ptr())
        )
        if joins:
            run.append(row)
        else:
            yield run
            run = [row]
    yield run


__all__ = ["PassedFence", "RowStack", "TorchBackend"]
