"""The size of a simulated engine's tier as it is typed: ``64GiB``."""

from engines.sim.profile import MOST_BLOCKS, EngineShape
from kvgate.engine.tier_flags import NONE
from kvgate.engine.units import parse_bytes
from kvgate.failure import CommandError
from kvgate.renamed import deprecated
from lab.simulate.limits import MOST_TIMES_HBM


def times_hbm(text: str, option: str, shape: EngineShape) -> float:
    """Return a tier's size as a multiple of the engine's HBM; 0 and none stand for no such tier.

    A number without a unit is such a multiple itself, as earlier versions took it. Raises ``CommandError``.
    """
    hbm_bytes = shape.hbm_blocks * shape.block_bytes
    if text.strip().lower() in {"0", "0.0", NONE}:
        return 0.0
    try:
        times = float(text) if text.strip().lower() not in {"inf", "nan", "infinity"} else None
    except ValueError:
        times = None
    if times is None:
        times = parse_bytes(text, option=option) / hbm_bytes
    else:
        deprecated(f"{option} {text}, a multiple of HBM,", f"a size: {option} {size_of(times, shape)}")
    most = min(MOST_TIMES_HBM, MOST_BLOCKS / shape.hbm_blocks)
    if not 0 <= times <= most:
        raise CommandError(f"{option} {text}: at most {most * hbm_bytes / 2**30:,.0f} GiB with this profile")
    return times


def size_of(times: float, shape: EngineShape) -> str:
    """Return a multiple of HBM as it is typed: whole GiB or MiB where it is any, else in bytes."""
    size = round(times * shape.hbm_blocks) * shape.block_bytes
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}B"
