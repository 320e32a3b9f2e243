"""A hierarchy over tiers of plain memory, driven step by step or by threads."""

import random
import time
from collections.abc import Iterable, Sequence

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.kv_policy import LruPolicy
from kvcontrol.kv_runtime import BlockRecord, HostArena
from kvcontrol.kv_runtime.crew import Crew, SteppedCrew, ThreadCrew
from kvcontrol.kv_runtime.hierarchy import HierarchyManager
from kvcontrol.kv_runtime.hierarchy_config import HierarchyConfig
from kvcontrol.kv_runtime.migrator_config import MigratorConfig
from kvcontrol.kv_runtime.quota import QuotaManager
from kvcontrol.kv_runtime.ticket import Change, Finished, SaveRequest, TicketId
from tests.support.memory_tier import MemoryDisk, MemoryTier

BLOCK_BYTES = 512
BATCH_BLOCKS = 4
_LIMIT_S = 60.0


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


def record(name: int, *, parent: int | None = None, tenant: str = "tenant") -> BlockRecord:
    """Return a record whose key and tokens follow from its name."""
    return BlockRecord(
        key=_key(name),
        parent=None if parent is None else _key(parent),
        tokens=name.to_bytes(8, "little"),
        tenant=tenant,
    )


def path(names: Iterable[int], *, parent: int | None = None, tenant: str = "tenant") -> list[BlockRecord]:
    """Return records that follow each other."""
    records = []
    for name in names:
        records.append(record(name, parent=parent, tenant=tenant))
        parent = name
    return records


def _key(name: int) -> BlockHash:
    return BlockHash(name.to_bytes(16, "little"))


class Rig:
    """One hierarchy with its engine memory, arena and disk, and what has come out of it so far."""

    def __init__(  # noqa: PLR0913 - what a test wants otherwise, by name
        self,
        config: HierarchyConfig | None = None,
        *,
        hbm: int = 32,
        ddr: int = 8,
        nvme: int = 16,
        threads: bool = False,
        disk: MemoryDisk | None = None,
        quotas: QuotaManager | None = None,
        arena: HostArena | None = None,
    ) -> None:
        self.clock = Clock()
        self.engine = MemoryTier(CacheTier.HBM, capacity_blocks=hbm, block_bytes=BLOCK_BYTES)
        self.arena = HostArena(slots=ddr, block_bytes=BLOCK_BYTES) if arena is None else arena
        self.disk = MemoryDisk(capacity_blocks=nvme, block_bytes=BLOCK_BYTES) if disk is None and nvme else disk
        self.quotas = QuotaManager() if quotas is None else quotas
        self.stepped = SteppedCrew()
        crew: Crew = ThreadCrew(helpers=1) if threads else self.stepped
        self.hierarchy = HierarchyManager(
            config_of() if config is None else config,
            engine=self.engine,
            arena=self.arena,
            durable=self.disk,
            make_policy=LruPolicy,
            quotas=self.quotas,
            clock=time.monotonic if threads else self.clock,
            crew=crew,
        )
        self.finished: dict[TicketId, Finished] = {}
        self.changes: list[Change] = []
        self._threads = threads
        self._rng = random.Random(5)  # noqa: S311 - reproducible, not secret

    def fill(self, slots: Sequence[int]) -> list[bytes]:
        """Put random bytes into engine slots and return them."""
        data = [self._rng.randbytes(BLOCK_BYTES) for _ in slots]
        self.engine.contents.update(zip(slots, data, strict=True))
        return data

    def poll(self) -> None:
        progress = self.hierarchy.poll()
        self.finished.update((end.ticket_id, end) for end in progress.finished)
        self.changes.extend(progress.changes)

    def run(self) -> None:
        """Let everything that is under way end."""
        if self._threads:
            assert self.hierarchy.drain(_LIMIT_S)
            self.poll()
            return
        self.poll()
        while self.stepped.run():
            self.poll()
        self.poll()

    def end_of(self, ticket_id: TicketId) -> Finished:
        """Return how a ticket ends, waiting for it."""
        until_s = time.monotonic() + _LIMIT_S
        while ticket_id not in self.finished:
            assert time.monotonic() < until_s, "a ticket without an end"
            if not self._threads:
                self.stepped.run()
            else:
                time.sleep(0.001)
            self.poll()
        return self.finished[ticket_id]

    def save(self, records: Sequence[BlockRecord], slots: Sequence[int] | None = None) -> list[bytes]:
        """Save a path of random bytes, to the end; returns them."""
        slots = range(len(records)) if slots is None else slots
        data = self.fill(slots)
        requests = [SaveRequest(record, slot) for record, slot in zip(records, slots, strict=True)]
        self.end_of(self.hierarchy.save(requests).ticket_id)
        return data

    def ids(self, records: Sequence[BlockRecord]) -> list[BlockId]:
        """Return the ids of records, all of which must be there."""
        found = [self.hierarchy.find(record.key) for record in records]
        assert None not in found
        return [block_id for block_id in found if block_id is not None]

    def tiers(self, record: BlockRecord) -> str:
        """Return where a record's block is: ``DDR NVME``, or an empty text."""
        block_id = self.hierarchy.find(record.key)
        return "" if block_id is None else " ".join(self.hierarchy.locate(block_id))

    def close(self) -> None:
        self.engine.read_gate.open()
        self.engine.write_gate.open()
        if self.disk is not None:
            self.disk.read_gate.open()
            self.disk.write_gate.open()
        assert self.hierarchy.close(_LIMIT_S)
        self.arena.close()


def config_of(**changes: object) -> HierarchyConfig:
    """Return a config with small batches."""
    migrator = MigratorConfig(
        batch_bytes=BATCH_BLOCKS * BLOCK_BYTES,
        engine_batch_bytes=BATCH_BLOCKS * BLOCK_BYTES,
        engine_workers=1,
        durable_workers=1,
    )
    return HierarchyConfig(**({"migrator": migrator} | changes))  # type: ignore[arg-type]
