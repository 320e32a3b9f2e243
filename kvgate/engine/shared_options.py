"""What ``kvgate engine`` and ``kvgate up`` make of the options that both have."""

from pathlib import Path

from kvcontrol.kv_runtime import WriteMode
from kvgate.engine.instance import EngineLimits
from kvgate.engine.tier_flags import TierFlags
from kvgate.engine.units import with_kv_memory


class SharedOptions:
    """Base of the dataclasses of options, which declare these fields at their places in ``--help``."""

    __slots__ = ()

    block_size: int | None
    kv_blocks: int | None
    kv_memory: str | None
    max_batch_size: int | None
    threads: int | None
    itl_target: float | None
    ddr: str | None
    ddr_path: str | None
    nvme: str | None
    nvme_dir: Path | None
    tier_write: WriteMode | None

    @property
    def limits(self) -> EngineLimits:
        """The limits of an engine, without its tiers. Raises ``CommandError`` for an amount that can't be read."""
        limits = EngineLimits(
            block_tokens=self.block_size,
            kv_blocks=self.kv_blocks,
            max_batch_size=self.max_batch_size,
            cpu_threads=self.threads,
            itl_target_ms=self.itl_target,
        )
        return with_kv_memory(limits, self.kv_memory)

    @property
    def tier_flags(self) -> TierFlags:
        """The options of the tiers as they were typed."""
        return TierFlags(
            ddr=self.ddr,
            ddr_path=self.ddr_path,
            nvme=self.nvme,
            nvme_dir=self.nvme_dir,
            write_mode=self.tier_write,
        )
