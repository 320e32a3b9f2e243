"""The hierarchy with its threads, slow and faulty devices and an engine that reuses memory as soon as it may."""

import random
import time

import pytest

from kvcontrol.core.ids import BlockId
from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.kv_runtime import (
    BlockRecord,
    BlockStatus,
    HostArena,
    MigratorConfig,
    Move,
    SaveRequest,
    TicketId,
)
from tests.support.memory_tier import MemoryDisk
from tests.support.tiers import BLOCK_BYTES, Rig, config_of, path

HBM = 64
ROUNDS = 1500
SERVED = 500
_LIMIT_S = 120.0


class SlowDisk(MemoryDisk):
    """Takes its time and fails now and then."""

    rng = random.Random(11)  # noqa: S311 - reproducible, not secret

    def read(self, moves: list[Move], arena: HostArena) -> list[BlockStatus]:  # type: ignore[override]
        self._dawdle()
        return super().read(moves, arena)

    def write(self, moves: list[Move], arena: HostArena) -> list[BlockStatus]:  # type: ignore[override]
        self._dawdle()
        return super().write(moves, arena)

    def _dawdle(self) -> None:
        time.sleep(self.rng.choice([0, 0, 0.0005, 0.002]))
        if self.rng.random() < 0.05:
            self.fail_reads.append(self.rng.choice([BlockStatus.FAILED, BlockStatus.CORRUPT]))
            self.fail_writes.append(self.rng.choice([BlockStatus.FAILED, BlockStatus.NO_SPACE]))


class Engine:
    """Saves and loads at random, checks what it got, and reuses its memory at once."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        self.free = list(range(HBM))
        self.lent: dict[TicketId, list[int]] = {}
        self.wanted: dict[TicketId, list[BlockId]] = {}
        self.saved: dict[BlockId, bytes] = {}
        self.served = 0

    def save(self) -> None:
        records = self._path()
        if len(records) > len(self.free):
            return
        slots = [self.free.pop() for _ in records]
        data = self.rig.fill(slots)
        known = [self.rig.hierarchy.find(one.key) for one in records]
        ticket = self.rig.hierarchy.save([SaveRequest(*pair) for pair in zip(records, slots, strict=True)])
        self.lent[ticket.ticket_id] = slots
        for block_id, before, written in zip(ticket.block_ids, known, data, strict=True):
            if block_id is not None and before is None:
                self.saved.setdefault(block_id, written)

    def load(self) -> None:
        found = [self.rig.hierarchy.find(one.key) for one in self._path()]
        ids = [block_id for block_id in found if block_id is not None][: len(self.free)]
        slots = [self.free.pop() for _ in ids]
        ticket = self.rig.hierarchy.load(ids, slots, deadline_s=self.rng.choice([0.002, 5.0]))
        self.lent[ticket], self.wanted[ticket] = slots, ids

    def prefetch(self) -> None:
        self.rig.hierarchy.prefetch(self.rng.sample(list(self.saved), min(4, len(self.saved))))

    def cancel(self) -> None:
        if self.lent:
            self.rig.hierarchy.cancel(self.rng.choice(list(self.lent)))

    def drop(self) -> None:
        if self.saved:
            self.rig.hierarchy.drop([self.rng.choice(list(self.saved))])

    def collect(self) -> None:
        time.sleep(0.0003)  # a step of an engine
        self.rig.poll()
        for ticket_id in [each for each in self.lent if each in self.rig.finished]:
            slots, ids = self.lent.pop(ticket_id), self.wanted.pop(ticket_id, [])
            outcomes = self.rig.finished[ticket_id].outcomes
            for block_id, slot, outcome in zip(ids, slots, outcomes, strict=False):
                if outcome.status is BlockStatus.OK:
                    assert self.rig.engine.contents[slot] == self.saved[block_id]
                    self.served += 1
            self.rig.fill(slots)
            self.free.extend(slots)

    def _path(self) -> list[BlockRecord]:
        first = 10 * self.rng.randrange(12)
        return path(range(first, first + self.rng.randint(1, 6)), tenant=f"tenant {first % 3}")


@pytest.mark.parametrize("mode", list(WriteMode))
def test_no_load_that_is_ok_has_other_bytes_than_were_saved(mode: WriteMode) -> None:
    rng = random.Random(str(mode))  # noqa: S311 - reproducible, not secret
    marks = Watermarks(high=0.8, low=0.6) if mode is WriteMode.BACK else Watermarks()
    migrator = MigratorConfig(
        batch_bytes=2 * BLOCK_BYTES, engine_batch_bytes=2 * BLOCK_BYTES, engine_workers=3, durable_workers=3
    )
    config = config_of(write_mode=mode, ddr=marks, migrator=migrator, retry_writes_after_s=0.01)
    disk = SlowDisk(capacity_blocks=40, block_bytes=BLOCK_BYTES)
    rig = Rig(config, hbm=HBM, ddr=16, disk=disk, threads=True)
    engine = Engine(rig, rng)

    def flip() -> None:
        if disk.contents:
            disk.flip(rng.choice(list(disk.contents)))

    acts = [engine.save, engine.load, engine.cancel, engine.prefetch, engine.drop, flip, engine.collect]
    until_s = time.monotonic() + _LIMIT_S
    rounds = 0
    while engine.served < SERVED or rounds < ROUNDS:
        assert time.monotonic() < until_s
        rounds += 1
        rng.choices(acts, weights=[35, 40, 10, 5, 3, 2, 60])[0]()
        if rng.random() < 0.02:
            rig.hierarchy.check_integrity()
    assert rig.hierarchy.drain(_LIMIT_S)
    engine.collect()
    assert not engine.lent
    rig.hierarchy.drop()
    assert rig.hierarchy.drain(_LIMIT_S)
    rig.hierarchy.check_integrity()
    stats = rig.hierarchy.stats()
    assert [tier.free_blocks for tier in stats.tiers.values()] == [16, 40]
    assert stats.worker_faults == 0
    assert not rig.engine.overlaps
    assert not disk.overlaps
    rig.close()
