"""The engine's own KV memory, on a CPU or a CUDA device.

An engine keeps a block as pieces, one in each *row* (a layer's keys and values): ``pages`` neighbouring pages of a
uint8 tensor ``[num_blocks * pages, page_bytes]``. In the arena the pieces lie one after the other. Rows that are cut
from one pool follow each other at a constant pitch, so that all pieces of a block are one strided copy (a *stack*).

Python can't drive such copies beside an engine loop that polls: each return into the interpreter waits for the GIL, and
255 blocks of 3.7 MB took seconds where the link needs 18 ms. Therefore a transfer is one native call that has let go
of the GIL, whatever the number of blocks: ``_foreach_copy_`` on a CPU, a batch of strided DMA on CUDA.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Fence, Move
from kvcontrol.kv_runtime.backends.cudart import NOT_READY, CudaRuntime
from kvcontrol.kv_runtime.backends.dma import HostSlots, Stack, operations
from kvcontrol.kv_runtime.errors import BackendError

_log = logging.getLogger(__name__)

_ROW_DIMS = 2
_FENCE_POLL_S = 50e-6
_FENCE_POLL_MAX_S = 1e-3


def _nobody() -> None:
    """Nobody is told that a transfer is queued."""


class PassedFence:
    """The fence of an engine that works synchronously, as on a CPU: always passed."""

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - there is nothing to wait for
        """See ``Fence``."""
        return True


class CudaFence:
    """The end of the work queued on the device's current stream. ``error`` is the reason why it can't be awaited.

    It passes ``grace_s`` after that.
    """

    def __init__(self, cuda: CudaRuntime, device: int, *, grace_s: float = 0.0) -> None:
        self.error = ""
        self._grace_s = grace_s
        self._passes_at_s: float | None = None
        self._cuda = cuda
        self._device = device
        self._event = torch.cuda.Event()
        try:
            self._event.record(torch.cuda.current_stream(device))
        except RuntimeError as error:
            self.error = str(error)

    def wait(self, timeout_s: float) -> bool:
        """See ``Fence``; False at once when CUDA has failed. Polls: CUDA's own wait has no time limit."""
        deadline = time.monotonic() + timeout_s
        pause_s = _FENCE_POLL_S
        while not self.error:
            if self._passes_at_s is not None:
                left_s = self._passes_at_s - time.monotonic()
                time.sleep(max(0.0, min(left_s, timeout_s)))
                return left_s <= timeout_s
            with self._cuda.on(self._device):
                code = self._cuda.passed(self._event.cuda_event)
            if code == 0:
                self._passes_at_s = time.monotonic() + self._grace_s
                timeout_s = max(0.0, deadline - time.monotonic())
                continue
            if code != NOT_READY:
                self.error = self._cuda.text(code)
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _FENCE_POLL_MAX_S)
        return False


class TorchBackend:
    """The KV memory behind ``rows`` (by name, in the order in which a block's pieces are stored).

    All rows are uint8, contiguous, on one CPU or CUDA device, with the same number of blocks; raises ``BackendError``
    when not. The tensors' memory must outlive the backend. Close it when no transfer is under way.
    """

    tier = CacheTier.HBM

    def __init__(self, rows: Mapping[str, torch.Tensor], *, pages: int = 1) -> None:
        self.capacity_blocks = _blocks_of(rows, pages)
        self.stacks = _stacked(list(rows.values()), self.capacity_blocks)
        self.block_bytes = sum(stack.rows * stack.piece_bytes for stack in self.stacks)
        self.last_error = ""
        self._copier = _copier(list(rows.values()), self.stacks)

    def fence(self, *, grace_s: float = 0.0) -> Fence:
        """See ``EngineBackendProtocol``; on CUDA, what the calling thread's current stream was given so far."""
        return self._copier.fence(grace_s)

    def pin(self, arena: HostArena) -> None:
        """Prepare an arena for transfers at link speed, until it is closed; raises ``BackendError`` when CUDA can't.

        Does nothing on a CPU. Without it transfers are right, and slow.
        """
        self._copier.pin(arena)

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        self._check(moves, arena)
        if arena.durable:
            for move in moves:
                arena.unseal(move.host)
        return self._copy(moves, arena, to_host=True)

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        """See ``KVBackendProtocol``."""
        self._check(moves, arena)
        return self._copy(moves, arena, to_host=False)

    def write_in_order(self, moves: Sequence[Move], arena: HostArena, queued: Callable[[], None]) -> list[BlockStatus]:
        """See ``OrderedBackendProtocol``; on a CPU writes are done at once, so ``queued`` is never called."""
        self._check(moves, arena)
        return self._copy(moves, arena, to_host=False, queued=queued)

    def join(self) -> None:
        """See ``OrderedBackendProtocol``; on CUDA, the calling thread's current stream is what the engine queues on."""
        self._copier.join()

    def close(self) -> None:
        """See ``KVBackendProtocol``."""
        self.capacity_blocks = 0
        self._copier.close()

    def _check(self, moves: Sequence[Move], arena: HostArena) -> None:
        if arena.block_bytes != self.block_bytes:
            raise ValueError(f"an arena with blocks of {arena.block_bytes} bytes, here {self.block_bytes}")
        capacity, slots = self.capacity_blocks, arena.slots
        for slot, host, _ in moves:
            if not 0 <= slot < capacity:
                raise IndexError(f"block {slot} of an engine with {capacity}")
            if not 0 <= host < slots:
                raise IndexError(f"slot {host} of an arena with {slots}")

    def _copy(
        self, moves: Sequence[Move], arena: HostArena, *, to_host: bool, queued: Callable[[], None] = _nobody
    ) -> list[BlockStatus]:
        if not moves:
            return []
        error = self._copier.copy(moves, arena, to_host=to_host, queued=queued)
        if error:
            self.last_error = f"{'read' if to_host else 'write'} of {len(moves)} blocks: {error}"
        return [BlockStatus.FAILED if error else BlockStatus.OK] * len(moves)


class _Copier(Protocol):
    """How one kind of device moves blocks."""

    def fence(self, grace_s: float) -> Fence: ...
    def pin(self, arena: HostArena) -> None: ...
    def join(self) -> None: ...
    def copy(self, moves: Sequence[Move], arena: HostArena, *, to_host: bool, queued: Callable[[], None]) -> str:
        """Copy, call ``queued`` if the device has still to do it, wait, and return why it failed, or nothing."""

    def close(self) -> None: ...


class _CpuCopier:
    def __init__(self, rows: Sequence[torch.Tensor], stacks: Sequence[Stack]) -> None:
        self._stacks = stacks
        self._views: list[torch.Tensor] = []
        row_at = {int(row.data_ptr()): row for row in rows}
        for stack in stacks:
            first = row_at[stack.address]
            shape = (stack.rows, first.numel() // stack.piece_bytes, stack.piece_bytes)
            self._views.append(first.as_strided(shape, (stack.pitch_bytes, stack.piece_bytes, 1)))

    def fence(self, grace_s: float) -> Fence:  # noqa: ARG002 - an answer is there already
        return PassedFence()

    def pin(self, arena: HostArena) -> None:
        pass

    def join(self) -> None:
        pass

    def copy(
        self,
        moves: Sequence[Move],
        arena: HostArena,
        *,
        to_host: bool,
        queued: Callable[[], None],  # noqa: ARG002 - nothing ever waits to be done
    ) -> str:
        # Engines make their memory in inference mode, and then it can be changed in that mode alone.
        with torch.inference_mode(), arena.whole() as memory:
            host = torch.frombuffer(memory, dtype=torch.uint8)
            inside, outside = [], []
            for stack, view in zip(self._stacks, self._views, strict=True):
                shape, strides = (stack.rows, stack.piece_bytes), (stack.piece_bytes, 1)
                for move in moves:
                    start = move.host * arena.pitch_bytes + stack.offset_bytes
                    outside.append(host.as_strided(shape, strides, start))
                    inside.append(view[:, move.slot])
            targets, sources = (outside, inside) if to_host else (inside, outside)
            torch._foreach_copy_(targets, sources)
        return ""

    def close(self) -> None:
        self._views.clear()


class _CudaCopier:
    def __init__(self, rows: Sequence[torch.Tensor], stacks: Sequence[Stack]) -> None:
        self._rows = list(rows)  # their memory stays while transfers name it by its address
        self._device = int(rows[0].device.index)
        self._cuda = CudaRuntime.loaded()
        limit = self._cuda.max_pitch_bytes(self._device)
        self._stacks = tuple(
            part for stack in stacks for part in (stack.split() if stack.pitch_bytes > limit else [stack])
        )
        self._to_host = torch.cuda.Stream(self._device)
        self._to_device = torch.cuda.Stream(self._device)

    def fence(self, grace_s: float) -> Fence:
        return CudaFence(self._cuda, self._device, grace_s=grace_s)

    def pin(self, arena: HostArena) -> None:
        with arena.whole() as memory:
            address, size_bytes = arena.address, len(memory)
        with self._cuda.on(self._device):
            code = self._cuda.pin(address, size_bytes)
        if code:
            raise BackendError(f"{size_bytes} bytes of host memory can't be pinned: {self._cuda.text(code)}")
        arena.on_close(lambda: self._unpin(address))

    def join(self) -> None:
        try:
            torch.cuda.current_stream(self._device).wait_stream(self._to_device)
        except RuntimeError as error:
            raise BackendError(f"the engine's stream can't wait for block transfers: {error}") from error

    def copy(self, moves: Sequence[Move], arena: HostArena, *, to_host: bool, queued: Callable[[], None]) -> str:
        cuda = self._cuda
        stream: int = (self._to_host if to_host else self._to_device).cuda_stream
        with cuda.on(self._device), arena.whole():  # the memory can't be given back while the device uses it
            host = HostSlots(address=arena.address, pitch_bytes=arena.pitch_bytes)
            refused = cuda.copy(operations(self._stacks, moves, host, to_host=to_host), stream)
            try:
                if not refused:
                    queued()
            finally:
                # Also after a failure: what was queued before it still moves.
                code = refused or cuda.synchronize(stream)
            return cuda.text(code) if code else ""

    def close(self) -> None:
        self._rows.clear()

    def _unpin(self, address: int) -> None:
        with self._cuda.on(self._device):
            code = self._cuda.unpin(address)
        if code:
            # A device that has failed has let go of the memory by itself; giving it back must go on.
            _log.warning("host memory could not be unpinned: %s", self._cuda.text(code))


def _copier(rows: Sequence[torch.Tensor], stacks: Sequence[Stack]) -> _Copier:
    device = rows[0].device
    if device.type == "cpu":
        return _CpuCopier(rows, stacks)
    if device.type == "cuda":
        return _CudaCopier(rows, stacks)
    raise BackendError(f"the KV rows are on {device}; allowed are: cpu, cuda")


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


def _stacked(rows: Sequence[torch.Tensor], blocks: int) -> tuple[Stack, ...]:
    """Join neighbours that lie at one pitch in one storage."""
    stacks = []
    offset = 0
    for run in _runs(rows):
        piece_bytes = run[0].numel() // blocks
        pitch_bytes = run[1].data_ptr() - run[0].data_ptr() if len(run) > 1 else blocks * piece_bytes
        stacks.append(
            Stack(
                address=run[0].data_ptr(),
                rows=len(run),
                pitch_bytes=pitch_bytes,
                piece_bytes=piece_bytes,
                offset_bytes=offset,
            )
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
