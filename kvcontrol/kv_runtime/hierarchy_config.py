"""How the tiers are run."""

import os
from dataclasses import dataclass, field

from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.kv_policy.migration import MigrationMode
from kvcontrol.kv_runtime.migrator_config import MigratorConfig


def _checksum_workers() -> int:
    """All but two of the cores that this process may use, 2 to 14: each checks some 6 GB/s, and a link brings 50."""
    return min(14, max(2, len(os.sched_getaffinity(0)) - 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyConfig:
    """Settings of the hierarchy; ``ValueError`` for invalid ones.

    ``*_deadline_s`` hold where a call names none. ``retry_writes_after_s``: an NVMe that fails is left alone so long.
    ``migrate``: what becomes of saves and demotions that cost more than they can save, by what was measured.
    ``checksum_workers`` and ``switch_interval_s``: see ``ThreadCrew``.
    """

    write_mode: WriteMode = WriteMode.THROUGH
    ddr: Watermarks = field(default_factory=Watermarks)
    nvme: Watermarks = field(default_factory=Watermarks)
    save_deadline_s: float = 30.0
    load_deadline_s: float = 10.0
    prefetch_deadline_s: float = 30.0
    retry_writes_after_s: float = 5.0
    checksum_workers: int = field(default_factory=_checksum_workers)
    switch_interval_s: float | None = 0.0005
    migrate: MigrationMode = MigrationMode.ALWAYS
    migrator: MigratorConfig = field(default_factory=MigratorConfig)

    def __post_init__(self) -> None:
        for name in ("save_deadline_s", "load_deadline_s", "prefetch_deadline_s", "checksum_workers"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be > 0")
        if self.switch_interval_s is not None and not self.switch_interval_s > 0:
            raise ValueError(f"switch_interval_s is {self.switch_interval_s}; it must be > 0, or None")
        if self.retry_writes_after_s < 0:
            raise ValueError(f"retry_writes_after_s is {self.retry_writes_after_s}; it must be >= 0")
        if self.write_mode is WriteMode.BACK and self.ddr.high >= 1:
            raise ValueError("write_back needs a high watermark of DDR below 1, from which on blocks are written back")
