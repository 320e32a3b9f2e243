"""What the tiers of an engine say of themselves, in the words of ``/kv/v1`` and ``/metrics``."""

import math

from engines.lmdeploy.tier_metrics import TenantCounts, TierCounts, bounded
from engines.lmdeploy.tiers import EngineTiers
from kvcontrol.agent import KVAgent
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import BenefitStats, OffloadStats, PathStats, PredictionStats, TierStats
from kvcontrol.core.tier_control import QuotaBody, Quotas, TenantUsageBody
from kvcontrol.kv_runtime import HierarchyManager
from kvcontrol.kv_runtime.block_file import padded


def tier_stats(tiers: EngineTiers) -> dict[CacheTier, TierStats]:
    """Return the state of every tier below HBM; any thread."""
    if tiers.hierarchy is None:
        return {}
    return {
        tier: TierStats(
            capacity_blocks=stats.capacity_blocks,
            used_blocks=stats.capacity_blocks - stats.free_blocks,
            cached_blocks=stats.used_blocks + stats.held_blocks,
            block_bytes=stats.block_bytes,
        )
        for tier, stats in tiers.hierarchy.stats().tiers.items()
    }


def tier_counts(tiers: EngineTiers) -> dict[CacheTier, TierCounts]:
    """Return what the tiers below HBM found and whose they are, for ``/metrics``; any thread."""
    if tiers.hierarchy is None or tiers.planner is None:
        return {}
    block_tokens = tiers.planner.identity.block_size_tokens
    return {
        tier: TierCounts(
            hit_tokens=sum(stats.hits.values()) * block_tokens,
            fragmentation_ratio=1 - stats.block_bytes / padded(stats.block_bytes),
            tenants=bounded(
                {
                    tenant: TenantCounts(
                        used_bytes=usage.used_bytes,
                        guaranteed_bytes=usage.quota.guaranteed_bytes,
                        burst_bytes=usage.quota.burst_bytes,
                        over_burst_blocks=usage.over_burst_blocks,
                        hit_blocks=stats.hits.get(tenant, 0),
                    )
                    for tenant, usage in stats.tenants.items()
                }
            ),
        )
        for tier, stats in tiers.hierarchy.stats().tiers.items()
    }


def offload_stats(tiers: EngineTiers) -> OffloadStats | None:
    """Return what the tiers did so far, None before they were started; any thread."""
    hierarchy, agent, planner = tiers.hierarchy, tiers.agent, tiers.planner
    if hierarchy is None or agent is None or planner is None:
        return None
    stats, reuse = hierarchy.stats(), agent.metrics.report()
    return OffloadStats(
        loads=planner.counters.loads,
        failed_loads=planner.counters.loads_failed,
        declined_loads=agent.declined,
        saves=planner.counters.saves,
        tail_saves=planner.counters.tail_saves,
        looked_up_tokens=reuse.looked_up_tokens,
        found_tokens=reuse.hit_tokens,
        collisions=reuse.collisions + stats.collisions,
        prefill_tokens_per_s=agent.prefill.tokens_per_s or 0.0,
        outcomes={f"{kind}:{status}:{reason}": blocks for (kind, status, reason), blocks in stats.outcomes.items()},
        losses={f"{tier}:{loss}": blocks for tier, each in stats.tiers.items() for loss, blocks in each.losses.items()},
        paths={
            str(name): PathStats(
                moved_blocks=lane.moved_blocks,
                moved_bytes=lane.moved_bytes,
                failed_blocks=lane.failed_blocks,
                queued_blocks=lane.queued_blocks,
                bandwidth_bytes_per_s=lane.bandwidth_bytes_per_s or 0.0,
            )
            for name, lane in stats.lanes.items()
        },
        guard_errors=tiers.guard.errors,
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
        prefetches=_prefetches(agent),
        break_even_blocks=_break_evens(hierarchy, planner.identity.block_size_tokens),
    )


def _prefetches(agent: KVAgent) -> dict[str, int]:
    if agent.prefetcher is None:
        return {}
    counts = agent.prefetcher.counts
    return {
        "prefetched": counts.prefetched_blocks,
        "used": counts.used_blocks,
        "wasted": counts.wasted_blocks,
    }


def _break_evens(hierarchy: HierarchyManager, block_tokens: int) -> dict[CacheTier, float]:
    found = {}
    for tier in hierarchy.stats().tiers:
        blocks = hierarchy.gate.break_even_blocks(tier, block_tokens=block_tokens)
        if blocks is not None:
            found[tier] = -1.0 if blocks == math.inf else blocks
    return found


def quotas(hierarchy: HierarchyManager) -> Quotas:
    """Return every tenant's use and quota in every tier; any thread."""
    return Quotas(
        tiers={
            tier: {
                tenant: TenantUsageBody(
                    used_blocks=usage.used_blocks,
                    used_bytes=usage.used_bytes,
                    quota=QuotaBody(
                        guaranteed_bytes=usage.quota.guaranteed_bytes,
                        burst_bytes=usage.quota.burst_bytes,
                        weight=usage.quota.weight,
                    ),
                    over_burst_blocks=usage.over_burst_blocks,
                )
                for tenant, usage in stats.tenants.items()
            }
            for tier, stats in hierarchy.stats().tiers.items()
        }
    )


__all__ = ["offload_stats", "quotas", "tier_counts", "tier_stats"]
