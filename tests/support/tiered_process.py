"""A process that keeps blocks in shared memory and in a file until it is killed; and how to open what it left.

    python -m tests.support.tiered_process FOLDER

prints a line for each block that has reached a tier: its name, its tiers. What a block's bytes are follows from its
name, so that whoever finds it again knows.
"""

import random
import sys
import time
from pathlib import Path

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy import LruPolicy
from kvcontrol.kv_runtime import (
    BlockFileSpec,
    Change,
    HierarchyConfig,
    HierarchyManager,
    HostArena,
    MigratorConfig,
    QuotaManager,
    SaveRequest,
)
from kvcontrol.kv_runtime.backends.file import FileBackend
from tests.support.memory_tier import MemoryTier
from tests.support.tiers import path

BLOCK_BYTES = 10_000
HBM, DDR, NVME = 64, 24, 96
_RUN_S = 60.0


def bytes_of(name: int) -> bytes:
    """Return the bytes of a block."""
    return random.Random(name).randbytes(BLOCK_BYTES)  # noqa: S311 - reproducible, not secret


def _file(at: Path, slots: int) -> BlockFileSpec:
    return BlockFileSpec(path=at, slots=slots, block_bytes=BLOCK_BYTES, identity=b"model")


class Tiers:
    """A hierarchy with threads over an arena in shared memory and a file, both in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.engine = MemoryTier(CacheTier.HBM, capacity_blocks=HBM, block_bytes=BLOCK_BYTES)
        self.arena = HostArena.in_file(_file(folder / "arena", DDR))
        self.disk = FileBackend(_file(folder / "blocks", NVME))
        self.hierarchy = HierarchyManager(
            HierarchyConfig(migrator=MigratorConfig(batch_bytes=4 * BLOCK_BYTES, engine_batch_bytes=4 * BLOCK_BYTES)),
            engine=self.engine,
            arena=self.arena,
            durable=self.disk,
            make_policy=LruPolicy,
            quotas=QuotaManager(),
        )

    def close(self) -> None:
        assert self.hierarchy.close(60)
        self.disk.close()
        self.arena.close()


def main() -> None:
    tiers = Tiers(Path(sys.argv[1]))
    tiers.hierarchy.recover()
    until_s = time.monotonic() + _RUN_S
    first = 0
    while time.monotonic() < until_s:
        names = range(first, first + 8)
        tiers.engine.contents.update({slot: bytes_of(name) for slot, name in enumerate(names)})
        ticket = tiers.hierarchy.save([SaveRequest(record, slot) for slot, record in enumerate(path(names))])
        changes: list[Change] = []
        ended = False
        while not ended and time.monotonic() < until_s:
            time.sleep(0.001)
            progress = tiers.hierarchy.poll()
            changes.extend(progress.changes)
            ended = any(end.ticket_id == ticket.ticket_id for end in progress.finished)
        for change in changes:
            if change.gained:
                print(int.from_bytes(change.record.key, "little"), change.tier, flush=True)  # noqa: T201
        first += 8


if __name__ == "__main__":
    main()
