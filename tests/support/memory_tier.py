"""Tiers of plain memory that fail when they are told to: what the runtime's tests run on.

They pass the contract suite of backends. Faults are statuses and delays, as devices have them; nothing is raised.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import BlockSeal, BlockStatus, HostArena, Move, Recovered, checksum


class Gate:
    """Holds back whoever comes until it is opened, at most ``limit_s``."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self._limit_s = limit_s
        self._open = threading.Event()
        self._open.set()
        self.arrived = threading.Semaphore(0)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.arrived.release()
        self._open.wait(self._limit_s)

    def wait_for_arrival(self) -> bool:
        return self.arrived.acquire(timeout=self._limit_s)


class MemoryTier:
    """Slots in memory. ``fail_reads`` and ``fail_writes`` say how the next blocks end; the others are ``OK``."""

    def __init__(
        self, tier: CacheTier, *, capacity_blocks: int, block_bytes: int, contents: dict[int, bytes] | None = None
    ) -> None:
        self.tier = tier
        self.capacity_blocks = capacity_blocks
        self.block_bytes = block_bytes
        self.last_error = ""
        self.fail_reads: list[BlockStatus] = []
        self.fail_writes: list[BlockStatus] = []
        self.read_gate = Gate()
        self.write_gate = Gate()
        self.log: list[tuple[str, tuple[int, ...]]] = []
        """Calls in the order in which they began, with their slots."""
        self.overlaps: Counter[int] = Counter()
        """Slots that two calls used at once, one of them a write."""
        self.contents: dict[int, bytes] = {} if contents is None else contents
        self.during: Callable[[], None] | None = None
        """What happens once while the next call is on the device."""
        self._busy: dict[int, list[str]] = {}
        self._lock = threading.Lock()

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        self._check(moves, arena)
        self._enter("read", moves)
        self.read_gate.pass_through()
        self._interrupt()
        statuses = [self._read(move, arena) for move in moves]
        self._leave("read", moves)
        return statuses

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        self._check(moves, arena)
        self._enter("write", moves)
        self.write_gate.pass_through()
        self._interrupt()
        statuses = [self._write(move, arena) for move in moves]
        self._leave("write", moves)
        return statuses

    def _interrupt(self) -> None:
        during, self.during = self.during, None
        if during is not None:
            during()

    def close(self) -> None:
        pass

    def _read(self, move: Move, arena: HostArena) -> BlockStatus:
        arena.unseal(move.host)
        with arena.view(move.host) as view:
            fault = self._next(self.fail_reads)
            if fault is not BlockStatus.OK:
                view[: self.block_bytes // 2] = bytes(self.block_bytes // 2)  # torn
                return fault
            view[:] = self.contents.get(move.slot, bytes(self.block_bytes))
        return BlockStatus.OK

    def _write(self, move: Move, arena: HostArena) -> BlockStatus:
        with arena.view(move.host) as view:
            fault = self._next(self.fail_writes)
            if fault is not BlockStatus.OK:
                self.contents[move.slot] = bytes(view[: self.block_bytes // 2]).ljust(self.block_bytes, b"\0")  # torn
                return fault
            self.contents[move.slot] = bytes(view)
        return BlockStatus.OK

    def _check(self, moves: Sequence[Move], arena: HostArena) -> None:
        if arena.block_bytes != self.block_bytes:
            raise ValueError(f"an arena with blocks of {arena.block_bytes} bytes, here {self.block_bytes}")
        for move in moves:
            if not (0 <= move.slot < self.capacity_blocks and 0 <= move.host < arena.slots):
                raise IndexError(f"{move.slot} or {move.host} is no slot")

    def _next(self, faults: list[BlockStatus]) -> BlockStatus:
        with self._lock:
            return faults.pop(0) if faults else BlockStatus.OK

    def _enter(self, what: str, moves: Sequence[Move]) -> None:
        with self._lock:
            self.log.append((what, tuple(move.slot for move in moves)))
            for move in moves:
                users = self._busy.setdefault(move.slot, [])
                if users and "write" in (what, *users):
                    self.overlaps[move.slot] += 1
                users.append(what)

    def _leave(self, what: str, moves: Sequence[Move]) -> None:
        with self._lock:
            for move in moves:
                self._busy[move.slot].remove(what)


class QueueingTier(MemoryTier):
    """Engine memory on a device that works through a queue: it tells that writes are queued, then does them."""

    def __init__(self, **shape: int) -> None:
        super().__init__(CacheTier.HBM, capacity_blocks=shape["capacity_blocks"], block_bytes=shape["block_bytes"])
        self.refuses = False
        self.joins = 0

    def fence(self, *, grace_s: float = 0.0) -> "QueueingTier":  # noqa: ARG002
        return self

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002 - nothing is queued before
        return True

    def write_in_order(self, moves: Sequence[Move], arena: HostArena, queued: Callable[[], None]) -> list[BlockStatus]:
        if not self.refuses:
            queued()
        return self.write(moves, arena)

    def join(self) -> None:
        self.joins += 1


def _flipped(data: bytes) -> bytes:
    other = bytearray(data)
    other[len(other) // 3] ^= 4
    return bytes(other)


class MemoryDisk(MemoryTier):
    """A durable one: what it holds outlives it when ``contents`` and ``seals`` are handed to the next."""

    record_bytes = sys.maxsize

    def __init__(
        self,
        *,
        capacity_blocks: int,
        block_bytes: int,
        contents: dict[int, bytes] | None = None,
        seals: dict[int, BlockSeal] | None = None,
    ) -> None:
        super().__init__(CacheTier.NVME, capacity_blocks=capacity_blocks, block_bytes=block_bytes, contents=contents)
        self.seals: dict[int, BlockSeal] = {} if seals is None else seals

    def recover(self) -> list[Recovered]:
        return [Recovered(slot, seal) for slot, seal in sorted(self.seals.items())]

    def erase(self, slots: Sequence[int]) -> list[BlockStatus]:
        for slot in slots:
            self.seals.pop(slot, None)
        return [BlockStatus.OK] * len(slots)

    def flip(self, slot: int) -> None:
        """Flip a bit of a slot's bytes, always the same one."""
        self.contents[slot] = _flipped(self.contents[slot])

    def as_sealed(self, slot: int) -> bytes:
        """Return a slot's bytes as they were written, flipped since or not: flipped twice, they are back."""
        data = self.contents[slot]
        return data if checksum(data) == self.seals[slot].checksum else _flipped(data)

    def _read(self, move: Move, arena: HostArena) -> BlockStatus:
        status = super()._read(move, arena)
        if status is not BlockStatus.OK or move.seal is None:
            return status
        with arena.view(move.host) as view:
            whole = self.seals.get(move.slot) == move.seal and checksum(view) == move.seal.checksum
        return BlockStatus.OK if whole else BlockStatus.CORRUPT

    def _write(self, move: Move, arena: HostArena) -> BlockStatus:
        self.seals.pop(move.slot, None)
        status = super()._write(move, arena)
        if status is BlockStatus.OK and move.seal is not None:
            self.seals[move.slot] = move.seal
        return status

    def _check(self, moves: Sequence[Move], arena: HostArena) -> None:
        super()._check(moves, arena)
        for move in moves:
            if move.seal is None:
                raise ValueError(f"slot {move.slot}: no block without its seal")
