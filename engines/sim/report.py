"""What a simulated engine says of itself, in the words of ``/kv/v1`` and ``/metrics``.

The runtime below believes blocks to be of one byte; here they get their size.
"""

from engines.control.tier_metrics import TenantCounts, TierCounts, bounded
from engines.sim.engine import SimEngine
from engines.sim.tiers import SimTiers
from kvcontrol import tier_report
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import OffloadStats, TierStats
from kvcontrol.core.tier_control import QuotaBody, Quotas
from kvcontrol.kv_runtime import TenantQuota


def tier_stats(engine: SimEngine) -> dict[CacheTier, TierStats]:
    """Return the state of every tier."""
    size = engine.profile.engine.block_bytes
    pool = engine.pool
    found = {
        CacheTier.HBM: TierStats(
            capacity_blocks=pool.capacity_blocks,
            used_blocks=pool.used_blocks,
            cached_blocks=pool.cached_blocks,
            block_bytes=size,
        )
    }
    if engine.tiers is not None:
        found |= tier_report.tier_stats(engine.tiers.hierarchy, unit_bytes=size)
    return found


def tier_counts(engine: SimEngine) -> dict[CacheTier, TierCounts]:
    """Return what the tiers found and whose they are, for ``/metrics``."""
    size, tokens = engine.profile.engine.block_bytes, engine.profile.engine.block_tokens
    pool = engine.pool
    counts = {
        CacheTier.HBM: TierCounts(
            hit_tokens=engine.counters.hit_tokens,
            fragmentation_ratio=max(0.0, 1 - pool.cached_blocks / pool.used_blocks) if pool.used_blocks else None,
        )
    }
    if engine.tiers is not None:
        for tier, stats in engine.tiers.hierarchy.stats().tiers.items():
            tenants = {
                tenant: TenantCounts(
                    used_bytes=usage.used_bytes * size,
                    guaranteed_bytes=usage.quota.guaranteed_bytes * size,
                    burst_bytes=tier_report.times(usage.quota.burst_bytes, size),
                    over_burst_blocks=usage.over_burst_blocks,
                    hit_blocks=stats.hits.get(tenant, 0),
                )
                for tenant, usage in stats.tenants.items()
            }
            counts[tier] = TierCounts(hit_tokens=sum(stats.hits.values()) * tokens, tenants=bounded(tenants))
    return counts


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


def quotas(tiers: SimTiers) -> Quotas:
    """Return every tenant's use and quota in every tier."""
    return tier_report.quotas(tiers.hierarchy, unit_bytes=tiers.block_bytes)


def quota_of(body: QuotaBody, size: int) -> TenantQuota:
    """Return a quota in the runtime's unit, guarantees rounded up to whole blocks, bursts down; or ``QuotaError``."""
    return TenantQuota(
        guaranteed_bytes=-(-body.guaranteed_bytes // size),
        burst_bytes=None if body.burst_bytes is None else body.burst_bytes // size,
        weight=body.weight,
    )


__all__ = ["offload_stats", "quota_of", "quotas", "tier_counts", "tier_stats"]
