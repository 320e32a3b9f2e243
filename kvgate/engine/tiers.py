"""The tiers below one engine's own KV pool, and how the engine is told of them."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShares:
    """Shares of each tier for one tenant: what it may fill, and what ``tenants`` (by engines' names) are guaranteed."""

    burst: float = 1.0
    guaranteed: float = 0.0
    tenants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """One engine's tiers. ``ddr_bytes`` 0 means none at all; ``nvme_dir`` and ``nvme_bytes`` go together.

    ``ddr_path`` None is memory of the engine's process alone. None elsewhere leaves the engine's default.
    """

    ddr_bytes: int = 0
    ddr_path: Path | None = None
    nvme_dir: Path | None = None
    nvme_bytes: int = 0
    write_mode: WriteMode | None = None
    ddr_watermarks: Watermarks | None = None
    nvme_watermarks: Watermarks | None = None
    ddr_policy: str | None = None
    nvme_policy: str | None = None
    load_deadline_s: float | None = None
    shares: TenantShares = field(default_factory=TenantShares)

    def of_instance(self, index: int) -> "TierOptions":
        """Return the same with file names of its own, for one of several engines on a machine."""
        return replace(
            self,
            ddr_path=None if self.ddr_path is None else self.ddr_path.with_name(f"{self.ddr_path.name}-{index}"),
            nvme_dir=None if self.nvme_dir is None else self.nvme_dir / f"engine-{index}",
        )

    def environment(self) -> dict[str, str]:
        """Return the engine's variables; empty without tiers."""
        if not self.ddr_bytes:
            return {}
        settings: dict[str, object | None] = {
            "KVGATE_ENGINE_DDR_BYTES": self.ddr_bytes,
            "KVGATE_ENGINE_DDR_PATH": self.ddr_path,
            "KVGATE_ENGINE_NVME_PATH": self.nvme_dir,
            "KVGATE_ENGINE_NVME_BYTES": self.nvme_bytes or None,
            "KVGATE_ENGINE_WRITE_MODE": self.write_mode,
            "KVGATE_ENGINE_DDR_HIGH_WATERMARK": self.ddr_watermarks and self.ddr_watermarks.high,
            "KVGATE_ENGINE_DDR_LOW_WATERMARK": self.ddr_watermarks and self.ddr_watermarks.low,
            "KVGATE_ENGINE_NVME_HIGH_WATERMARK": self.nvme_watermarks and self.nvme_watermarks.high,
            "KVGATE_ENGINE_NVME_LOW_WATERMARK": self.nvme_watermarks and self.nvme_watermarks.low,
            "KVGATE_ENGINE_DDR_POLICY": self.ddr_policy,
            "KVGATE_ENGINE_NVME_POLICY": self.nvme_policy,
            "KVGATE_ENGINE_LOAD_DEADLINE_S": self.load_deadline_s,
            "KVGATE_ENGINE_TENANT_BURST_SHARE": self.shares.burst if self.shares.burst < 1 else None,
            "KVGATE_ENGINE_TENANT_GUARANTEED_SHARE": self.shares.guaranteed or None,
            "KVGATE_ENGINE_GUARANTEED_TENANTS": ",".join(self.shares.tenants) or None,
        }
        return {name: str(value) for name, value in settings.items() if value is not None}

    def __str__(self) -> str:
        if not self.ddr_bytes:
            return "none"
        ddr = f"DDR {_amount(self.ddr_bytes)} in {self.ddr_path or 'memory of its process'}"
        if self.nvme_dir is None:
            return ddr
        return f"{ddr}, NVMe {_amount(self.nvme_bytes)} in {self.nvme_dir}" + (
            f", {self.write_mode}" if self.write_mode else ""
        )


def _amount(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.4g} GiB" if size_bytes >= 1 << 30 else f"{size_bytes / 2**20:.4g} MiB"
