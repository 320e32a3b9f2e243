"""The options of ``kvgate engine`` and ``kvgate up`` that say what lies below the engines' own KV pools."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode
from kvgate.engine.tiers import TierOptions
from kvgate.engine.units import parse_bytes
from kvgate.failure import CommandError

if TYPE_CHECKING:
    from kvcontrol.presets import Preset, TierPart

NONE: Final = "none"
"""What switches off what a preset asks for."""
_PANEL: Final = "Tiers"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFlags:
    """The options of the tiers as they were typed; None where one wasn't."""

    preset: Annotated[
        str | None,
        typer.Option(
            help="Settings and tiers for a kind of traffic; kvgate doctor lists them.", rich_help_panel=_PANEL
        ),
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(help="Hardware of the preset. Default: the visible GPU, else cpu.", rich_help_panel=_PANEL),
    ] = None
    ddr: Annotated[
        str | None,
        typer.Option(
            help="Host memory for KV blocks of each engine, for example 4GiB, or none.", rich_help_panel=_PANEL
        ),
    ] = None
    ddr_path: Annotated[
        str | None,
        typer.Option(
            help="File of the DDR tier, for example /dev/shm/kv: blocks survive the engine. "
            "none: memory of its process.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    nvme: Annotated[
        str | None,
        typer.Option(
            help="Disk space for KV blocks of each engine, for example 64GiB, or none.", rich_help_panel=_PANEL
        ),
    ] = None
    nvme_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the NVMe tier. Default: tiers in the cache folder.", rich_help_panel=_PANEL),
    ] = None
    tier_write: Annotated[
        WriteMode | None,
        typer.Option(help="Time at which blocks are written from DDR to disk.", rich_help_panel=_PANEL),
    ] = None


def nvme_root_dir() -> Path:
    """Return where NVMe tiers go that nobody gave a folder; like all of the cache folder it may be deleted."""
    from engines.models.cache import cache_dir

    return cache_dir() / "tiers"


def tier_options(flags: TierFlags, preset: "Preset | None", model_name: str, nvme_root: Path) -> TierOptions:
    """Return the tiers: the options' word, else the preset's, else none. Raises ``CommandError`` for half of a tier.

    Files whose place nobody named carry the model's name: a file of one model's blocks is refused to another's engine.
    """
    ddr_bytes = _size(flags.ddr, "--ddr", preset.ddr.size_bytes if preset else 0)
    requested = {
        "--ddr-path": flags.ddr_path,
        "--nvme-dir": flags.nvme_dir,
        "--nvme": flags.nvme,
        "--tier-write": flags.tier_write,
    }
    if not ddr_bytes:
        extra = [name for name, value in requested.items() if value is not None]
        if extra:
            raise CommandError(
                f"{', '.join(extra)}: no DDR tier is configured",
                "add a DDR tier with --ddr, for example --ddr 4GiB, or with --preset",
            )
        return TierOptions()
    nvme_bytes = _size(flags.nvme, "--nvme", preset.nvme.size_bytes if preset and preset.nvme else 0)
    if not nvme_bytes:
        extra = [name for name in ("--nvme-dir", "--tier-write") if requested[name] is not None]
        if extra:
            raise CommandError(
                f"{', '.join(extra)}: no NVMe tier is configured",
                "add an NVMe tier with --nvme, for example --nvme 64GiB",
            )
    suffix = re.sub(r"[^\w.-]", "_", model_name)
    path = flags.ddr_path if flags.ddr_path is not None else (f"{preset.ddr.path}-{suffix}" if preset else NONE)
    if path != NONE and (not path.startswith("/") or path.endswith("/")):
        raise CommandError(
            f"--ddr-path is {path!r}; expected the absolute path of a file, for example /dev/shm/kv, or none"
        )
    preset_mode = preset.nvme.write_mode if preset and preset.nvme else None
    return TierOptions(
        ddr_bytes=ddr_bytes,
        ddr_path=None if path == NONE else Path(path),
        nvme_dir=(flags.nvme_dir or nvme_root / suffix).absolute() if nvme_bytes else None,
        nvme_bytes=nvme_bytes,
        write_mode=(flags.tier_write or preset_mode) if nvme_bytes else None,
        ddr_watermarks=_marks(preset.ddr) if preset else None,
        nvme_watermarks=_marks(preset.nvme) if preset and preset.nvme and nvme_bytes else None,
        ddr_policy=preset.ddr.policy if preset else None,
        nvme_policy=preset.nvme.policy if preset and preset.nvme and nvme_bytes else None,
        load_deadline_s=preset.load_deadline_s if preset else None,
    )


def _marks(tier: "TierPart") -> Watermarks:
    return Watermarks(high=tier.high_watermark, low=tier.low_watermark)


def _size(text: str | None, option: str, otherwise: int) -> int:
    if text is None:
        return otherwise
    return 0 if text.strip().lower() == NONE else parse_bytes(text, option=option)
