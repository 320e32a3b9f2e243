"""What a simulated engine says of itself, in the words of ``/kv/v1`` and ``/metrics``.

The runtime below believes blocks to be of one byte; here they get their size.
"""

from engines.control import tier_metrics
from engines.control.tier_metrics import TierCounts
from engines.sim.engine import SimEngine
from engines.sim.tiers import SimTiers
from kvcontrol import tier_report
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import OffloadStats, TierStats


def tier_stats(engine: SimEngine) -> dict[CacheTier, TierStats]:
    """Return the state of every tier."""
    size = engine.profile.engine.block_bytes
    pool = engine.pool
    found = {
        CacheTier.HBM: TierStats(
            capacity_blocks=pool.capacity_blocks,
            used_blocks=pool.used_blocks,
            cached_blocks=len(pool.cached),
            block_bytes=size,
        )
    }
    if engine.tiers is not None:
        found |= tier_report.tier_stats(engine.tiers.hierarchy, unit_bytes=size)
    return found


def tier_counts(engine: SimEngine) -> dict[CacheTier, TierCounts]:
    """Return what the tiers found and whose they are, for ``/metrics``."""
    shape = engine.profile.engine
    hbm = tier_metrics.hbm_counts(tier_stats(engine)[CacheTier.HBM], hit_tokens=engine.counters.hit_tokens)
    if engine.tiers is None:
        return {CacheTier.HBM: hbm}
    below = tier_metrics.tier_counts(
        engine.tiers.hierarchy, block_tokens=shape.block_tokens, unit_bytes=shape.block_bytes
    )
    return {CacheTier.HBM: hbm} | below


def offload_stats(tiers: SimTiers) -> OffloadStats:
    """Return what the tiers did so far."""
    counters = tiers.counters
    return tier_report.offload_stats(
        tiers.hierarchy,
        tiers.agent,
        loads=counters.loads,
        failed_loads=counters.failed_loads,
        saves=counters.saves,
        tail_saves=counters.tail_saves,
        guard_errors=0,
        block_tokens=tiers.block_tokens,
        unit_bytes=tiers.block_bytes,
    )
