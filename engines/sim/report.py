"""What a simulated engine says of itself, in the words of ``/kv/v1`` and ``/metrics``.

The runtime below believes blocks to be of one byte; here they get their size.
"""

import math

from engines.lmdeploy.tier_metrics import TenantCounts, TierCounts, bounded
from engines.sim.engine import SimEngine
from engines.sim.tiers import SimTiers
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import BenefitStats, OffloadStats, PathStats, PredictionStats, TierStats
from kvcontrol.core.tier_control import QuotaBody, Quotas, TenantUsageBody
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
        for tier, stats in engine.tiers.hierarchy.stats().tiers.items():
            found[tier] = TierStats(
                capacity_blocks=stats.capacity_blocks,
                used_blocks=stats.capacity_blocks - stats.free_blocks,
                cached_blocks=stats.used_blocks + stats.held_blocks,
                block_bytes=size,
            )
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
                    burst_bytes=_times(usage.quota.burst_bytes, size),
                    over_burst_blocks=usage.over_burst_blocks,
                    hit_blocks=stats.hits.get(tenant, 0),
                )
                for tenant, usage in stats.tenants.items()
            }
            counts[tier] = TierCounts(hit_tokens=sum(stats.hits.values()) * tokens, tenants=bounded(tenants))
    return counts


def offload_stats(tiers: SimTiers) -> OffloadStats:
    """Return what the tiers did so far."""
    stats, reuse, counters = tiers.hierarchy.stats(), tiers.agent.metrics.report(), tiers.counters
    size = tiers.block_bytes
    return OffloadStats(
        loads=counters.loads,
        failed_loads=counters.failed_loads,
        declined_loads=tiers.agent.declined,
        saves=counters.saves,
        tail_saves=counters.tail_saves,
        looked_up_tokens=reuse.looked_up_tokens,
        found_tokens=reuse.hit_tokens,
        collisions=reuse.collisions + stats.collisions,
        prefill_tokens_per_s=tiers.agent.prefill.tokens_per_s or 0.0,
        outcomes={f"{kind}:{status}:{reason}": blocks for (kind, status, reason), blocks in stats.outcomes.items()},
        losses={f"{tier}:{loss}": blocks for tier, each in stats.tiers.items() for loss, blocks in each.losses.items()},
        paths={
            str(name): PathStats(
                moved_blocks=lane.moved_blocks,
                moved_bytes=lane.moved_bytes * size,
                failed_blocks=lane.failed_blocks,
                queued_blocks=lane.queued_blocks,
                bandwidth_bytes_per_s=(lane.bandwidth_bytes_per_s or 0.0) * size,
            )
            for name, lane in stats.lanes.items()
        },
        guard_errors=0,
        worker_faults=stats.worker_faults,
        lookup_p50_s=reuse.lookup_p50_s,
        lookup_p99_s=reuse.lookup_p99_s,
        predictions={
            str(quantity): PredictionStats(
                predictions=report.predictions, relative_error=report.relative, bias=report.bias
            )
            for quantity, report in stats.errors.items()
        },
        benefits={
            f"{src.lower()}_to_{dst.lower()}": BenefitStats(
                worth_blocks=each.worth_blocks,
                not_worth_blocks=each.not_worth_blocks,
                declined_blocks=each.declined_blocks,
                net_benefit_s=each.net_benefit_s,
            )
            for (src, dst), each in stats.benefits.items()
        },
        break_even_blocks=_break_evens(tiers),
    )


def quotas(tiers: SimTiers) -> Quotas:
    """Return every tenant's use and quota in every tier."""
    size = tiers.block_bytes
    return Quotas(
        tiers={
            tier: {
                tenant: TenantUsageBody(
                    used_blocks=usage.used_blocks,
                    used_bytes=usage.used_bytes * size,
                    quota=QuotaBody(
                        guaranteed_bytes=usage.quota.guaranteed_bytes * size,
                        burst_bytes=_times(usage.quota.burst_bytes, size),
                        weight=usage.quota.weight,
                    ),
                    over_burst_blocks=usage.over_burst_blocks,
                )
                for tenant, usage in stats.tenants.items()
            }
            for tier, stats in tiers.hierarchy.stats().tiers.items()
        }
    )


def quota_of(body: QuotaBody, size: int) -> TenantQuota:
    """Return a quota in the runtime's unit, guarantees rounded up to whole blocks, bursts down; or ``QuotaError``."""
    return TenantQuota(
        guaranteed_bytes=-(-body.guaranteed_bytes // size),
        burst_bytes=None if body.burst_bytes is None else body.burst_bytes // size,
        weight=body.weight,
    )


def _times(count: int | None, size: int) -> int | None:
    return None if count is None else count * size


def _break_evens(tiers: SimTiers) -> dict[CacheTier, float]:
    hierarchy = tiers.hierarchy
    found = {}
    for tier in hierarchy.stats().tiers:
        blocks = hierarchy.gate.break_even_blocks(tier, block_tokens=tiers.block_tokens)
        if blocks is not None:
            found[tier] = -1.0 if blocks == math.inf else blocks
    return found


__all__ = ["offload_stats", "quota_of", "quotas", "tier_counts", "tier_stats"]
