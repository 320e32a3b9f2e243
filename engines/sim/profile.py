"""What is simulated: an engine's sizes and speeds, read from a TOML file that also holds what was measured.

A file's coefficients are the fit of its own measurements (``calibration``), so that anybody can repeat it.
"""

import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from engines.sim.pacing import AT_ONCE, check_pace
from engines.sim.timing import TimeModel

FOLDER: Final = Path(__file__).with_name("profiles")
MOST_BLOCKS: Final = 10_000_000
"""Of one tier of one instance: each takes memory of the simulation."""
_MOST_TOKENS: Final = 1 << 30
MOST_BATCH: Final = 100_000
_MOST_BLOCK_BYTES: Final = 1 << 40
_MOST_BYTES_PER_S: Final = 1e18
_MOST_FILE_BYTES: Final = 1 << 20
_SECTIONS: Final = ("about", "engine", "links", "time", "measured")


class ProfileError(ValueError):
    """A profile can't be used; the message names file, place and what is allowed."""


SHAPE_LIMITS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "block_tokens": (1, _MOST_TOKENS),
        "block_bytes": (1, _MOST_BLOCK_BYTES),
        "hbm_blocks": (1, MOST_BLOCKS),
        "ddr_blocks": (0, MOST_BLOCKS),
        "nvme_blocks": (0, MOST_BLOCKS),
        "max_batch": (1, MOST_BATCH),
        "max_prefill_tokens": (1, _MOST_TOKENS),
        "context_tokens": (1, _MOST_TOKENS),
    }
)
"""The least and the most that each size of an engine may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Sizes, in blocks of ``block_tokens``; a tier of 0 blocks isn't there. ``block_bytes`` is one block's KV.

    ``max_batch`` sequences run at once, a prefill step computes at most ``max_prefill_tokens``, prompt and answer
    together have at most ``context_tokens``. ``pace`` says whether a step computes prompts or tokens (``pacing``).
    """

    block_tokens: int
    block_bytes: int
    kv_dtype: str
    hbm_blocks: int
    ddr_blocks: int = 0
    nvme_blocks: int = 0
    max_batch: int
    max_prefill_tokens: int
    context_tokens: int
    pace: str = AT_ONCE
    policy: str = "lru"
    tier_policy: str = "lru"

    def __post_init__(self) -> None:
        for name, (least, most) in SHAPE_LIMITS.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed is {least} to {most:,}")
        check_pace(self.pace)
        if self.nvme_blocks and not self.ddr_blocks:
            raise ValueError(f"{self.ddr_blocks} blocks of DDR and {self.nvme_blocks} of NVMe; NVMe needs DDR")

    def with_block_tokens(self, block_tokens: int) -> "EngineShape":
        """Return the same memory, cut into blocks of another size."""
        if block_tokens < 1:
            raise ValueError(f"blocks of {block_tokens} tokens; it must be > 0")
        share = self.block_tokens / block_tokens
        return replace(
            self,
            block_tokens=block_tokens,
            block_bytes=max(1, round(self.block_bytes / share)),
            hbm_blocks=max(1, int(self.hbm_blocks * share)),
            ddr_blocks=int(self.ddr_blocks * share),
            nvme_blocks=int(self.nvme_blocks * share),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What each direction between two tiers moves, in bytes/s."""

    hbm_to_ddr_bytes_per_s: float
    ddr_to_hbm_bytes_per_s: float
    ddr_to_nvme_bytes_per_s: float
    nvme_to_ddr_bytes_per_s: float

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 1 <= getattr(self, each.name) <= _MOST_BYTES_PER_S:
                raise ValueError(
                    f"{each.name} is {getattr(self, each.name)}; allowed is 1 to {_MOST_BYTES_PER_S:g} bytes/s"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPrefill:
    """Time to the first token of a prompt of ``tokens`` after ``cached`` ones, alone on the engine."""

    tokens: int
    cached: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDecode:
    """Time between tokens with ``batch`` sequences of ``context`` tokens each."""

    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the coefficients were fitted to. ``fixed`` ones were not: they are known from elsewhere."""

    prefill: tuple[MeasuredPrefill, ...] = ()
    decode: tuple[MeasuredDecode, ...] = ()
    fixed: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of engine. ``source`` says where its numbers come from, ``limits`` which figures not to use."""

    name: str
    summary: str
    source: str
    limits: str = ""
    engine: EngineShape
    links: Links
    time: TimeModel
    measured: Measured = Measured()


def shipped() -> list[str]:
    """Return the names of the profiles that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_profile(name: str) -> Profile:
    """Read a profile that ships by its name, or any other by the path of its file; raises ``ProfileError``."""
    path = FOLDER / f"{name}.toml" if name in shipped() else Path(name)
    try:
        raw = tomllib.loads(_text(path))
    except FileNotFoundError:
        raise ProfileError(f"unknown profile {name!r}; known: {', '.join(shipped())}, or a file's path") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"{path}: it can't be read as a profile: {error}") from error
    return parse_profile(raw, path=path)


def _text(path: Path) -> str:
    """Return a profile's text; raises ``ProfileError`` for what is no small file, and as reading text does."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MOST_FILE_BYTES:
        raise ProfileError(f"{path}: it is no profile: that is a regular file of at most {_MOST_FILE_BYTES:,} bytes")
    return path.read_text(encoding="utf-8")


def parse_profile(raw: Mapping[str, Any], *, path: Path) -> Profile:
    """Return what a file said; raises ``ProfileError``."""
    _known(path, "", raw, _SECTIONS)
    about = _section(path, raw, "about")
    _known(path, "about", about, ("summary", "source", "limits"))
    measured = _section(path, raw, "measured") if "measured" in raw else {}
    _known(path, "measured", measured, ("prefill", "decode", "fixed"))
    return Profile(
        name=path.stem,
        summary=str(about.get("summary", "")),
        source=str(about.get("source", "")),
        limits=str(about.get("limits", "")),
        engine=_read(path, "engine", EngineShape, _section(path, raw, "engine")),
        links=_read(path, "links", Links, _section(path, raw, "links")),
        time=_read(path, "time", TimeModel, _section(path, raw, "time")),
        measured=Measured(
            prefill=_rows(path, "measured.prefill", MeasuredPrefill, measured.get("prefill", ())),
            decode=_rows(path, "measured.decode", MeasuredDecode, measured.get("decode", ())),
            fixed={str(key): float(value) for key, value in measured.get("fixed", {}).items()},
        ),
    )


def _section(path: Path, raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = raw.get(name)
    if not isinstance(section, dict):
        raise ProfileError(f"{path}: missing section [{name}]; sections of a profile: {', '.join(_SECTIONS)}")
    return section


def _known(path: Path, where: str, raw: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for name in raw:
        if name not in allowed:
            place = f"[{where}]" if where else "the file"
            raise ProfileError(f"{path}: {place} has no {name!r}; allowed are {', '.join(allowed)}")


def _rows(path: Path, where: str, kind: type[Any], rows: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    return tuple(_read(path, where, kind, row) for row in rows)


def _read(path: Path, where: str, kind: type[Any], raw: Mapping[str, Any]) -> Any:
    """Make a dataclass of what a section says: numbers where it has numbers, and nothing that it doesn't know."""
    known = {each.name: each for each in fields(kind)}
    _known(path, where, raw, tuple(known))
    values: dict[str, Any] = {}
    for name, value in raw.items():
        wanted = known[name].type
        good = (
            isinstance(value, str)
            if wanted is str
            else isinstance(value, int if wanted is int else int | float) and not isinstance(value, bool)
        )
        if not good:
            raise ProfileError(
                f"{path}: [{where}] {name} is {value!r}; allowed is a {getattr(wanted, '__name__', wanted)}"
            )
        values[name] = float(value) if wanted is float else value
    try:
        return kind(**values)
    except TypeError as error:
        missing = [name for name in known if name not in values]
        raise ProfileError(f"{path}: [{where}] lacks something of {', '.join(missing)}: {error}") from error
    except ValueError as error:
        raise ProfileError(f"{path}: [{where}] {error}") from error
