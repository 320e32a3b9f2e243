"""The tiers below an engine's own KV pool, as a command's options say or a preset does, and as an engine is told."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvcontrol.presets import Preset
from kvgate.failure import CommandError
from kvgate.units import parse_bytes

NONE: Final = "none"
"""What switches off what a preset asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFlags:
    """The options as they were typed; None where one wasn't."""

    ddr: str | None = None
    ddr_path: str | None = None
    nvme_dir: Path | None = None
    nvme: str | None = None
    write_mode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """One engine's tiers. ``ddr_bytes`` 0 means none at all; ``nvme_dir`` and ``nvme_bytes`` go together.

    ``ddr_path`` None is memory of the engine's process alone. None elsewhere leaves the engine's default.
    """

    ddr_bytes: int = 0
    ddr_path: Path | None = None
    nvme_dir: Path | None = None
    nvme_bytes: int = 0
    write_mode: str | None = None
    load_deadline_s: float | None = None

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
        told: dict[str, object | None] = {
            "KVGATE_ENGINE_DDR_BYTES": self.ddr_bytes,
            "KVGATE_ENGINE_DDR_PATH": self.ddr_path,
            "KVGATE_ENGINE_NVME_PATH": self.nvme_dir,
            "KVGATE_ENGINE_NVME_BYTES": self.nvme_bytes or None,
            "KVGATE_ENGINE_WRITE_MODE": self.write_mode,
            "KVGATE_ENGINE_LOAD_DEADLINE_S": self.load_deadline_s,
        }
        return {name: str(value) for name, value in told.items() if value is not None}


def default_nvme_dir() -> Path:
    """Return the folder of the NVMe tier where none is named; like all of the cache folder it may be deleted."""
    from engines.models.cache import cache_dir

    return cache_dir() / "tiers"


def tier_options(flags: TierFlags, preset: Preset | None, nvme_dir: Path) -> TierOptions:
    """Return the tiers: the options' word, else the preset's, else none; ``nvme_dir`` is where none is named.

    Raises ``CommandError`` for half of a tier.
    """
    ddr_bytes = _size(flags.ddr, "--ddr", preset.ddr.size_bytes if preset else 0)
    asked = {
        "--ddr-path": flags.ddr_path,
        "--nvme-dir": flags.nvme_dir,
        "--nvme": flags.nvme,
        "--tier-write": flags.write_mode,
    }
    if not ddr_bytes:
        extra = [name for name, value in asked.items() if value is not None]
        if extra:
            raise CommandError(
                f"{', '.join(extra)}: there is no DDR tier, and every block goes through it",
                "say how large with --ddr, like --ddr 4GiB, or name a --preset",
            )
        return TierOptions()
    nvme_bytes = _size(flags.nvme, "--nvme", preset.nvme.size_bytes if preset and preset.nvme else 0)
    if not nvme_bytes:
        extra = [name for name in ("--nvme-dir", "--tier-write") if asked[name] is not None]
        if extra:
            raise CommandError(
                f"{', '.join(extra)}: there is no NVMe tier", "say how large with --nvme, like --nvme 64GiB"
            )
    path = flags.ddr_path if flags.ddr_path is not None else (preset.ddr.path if preset else NONE)
    if path != NONE and (not path.startswith("/") or path.endswith("/")):
        raise CommandError(f"--ddr-path is {path!r}; it is the absolute path of a file, like /dev/shm/kv, or none")
    preset_mode = preset.nvme.write_mode if preset and preset.nvme else None
    return TierOptions(
        ddr_bytes=ddr_bytes,
        ddr_path=None if path == NONE else Path(path),
        nvme_dir=(flags.nvme_dir or nvme_dir).absolute() if nvme_bytes else None,
        nvme_bytes=nvme_bytes,
        write_mode=(flags.write_mode or preset_mode) if nvme_bytes else None,
        load_deadline_s=preset.load_deadline_s if preset else None,
    )


def _size(text: str | None, option: str, otherwise: int) -> int:
    if text is None:
        return otherwise
    return 0 if text.strip().lower() == NONE else parse_bytes(text, option=option)


__all__ = ["NONE", "TierFlags", "TierOptions", "default_nvme_dir", "tier_options"]
