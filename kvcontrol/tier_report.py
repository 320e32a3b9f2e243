"""What the tiers below HBM say of themselves, in the words of ``/kv/v1``, whichever engine they serve.

``unit_bytes``: what the runtime takes for one byte, where it was told less than is true (a simulated engine's blocks).
"""

import math
from collections.abc import Mapping

from kvcontrol.agent import KVAgent
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import BenefitStats, OffloadStats, PathStats, PredictionStats, TierStats
from kvcontrol.core.tier_control import QuotaBody, Quotas, TenantUsageBody
from kvcontrol.kv_runtime import HierarchyManager, HierarchyStats, Loss, TenantQuota


def tier_stats(hierarchy: HierarchyManager, *, unit_bytes: int = 1) -> dict[CacheTier, TierStats]:
    """Return the state of every tier below HBM; any thread."""
    return {
        tier: TierStats(
            capacity_blocks=stats.capacity_blocks,
            used_blocks=stats.capacity_blocks - stats.free_blocks,
            cached_blocks=stats.used_blocks + stats.held_blocks,
            block_bytes=stats.block_bytes * unit_bytes,
        )
        for tier, stats in hierarchy.stats().tiers.items()
    }


def offload_stats(  # noqa: PLR0913 - what only the engine's own side knows, by name
    hierarchy: HierarchyManager,
    agent: KVAgent,
    *,
    loads: int,
    failed_loads: int,
    saves: int,
    tail_saves: int,
    guard_errors: int,
    block_tokens: int,
    failed_saves_in_a_row: int = 0,
    save_failure: str = "",
    unit_bytes: int = 1,
) -> OffloadStats:
    """Return what the tiers did so far; any thread."""
    stats, reuse = hierarchy.stats(), agent.metrics.report()
    return OffloadStats(
        loads=loads,
        failed_loads=failed_loads,
        declined_loads=agent.declined,
        saves=saves,
        tail_saves=tail_saves,
        looked_up_tokens=reuse.looked_up_tokens,
        found_tokens=reuse.hit_tokens,
        collisions=reuse.collisions + stats.collisions,
        prefill_tokens_per_s=agent.prefill.tokens_per_s or 0.0,
        outcomes={f"{kind}:{status}:{reason}": blocks for (kind, status, reason), blocks in stats.outcomes.items()},
        losses={f"{tier}:{loss}": each.losses.get(loss, 0) for tier, each in stats.tiers.items() for loss in Loss},
        paths=_paths(stats, unit_bytes),
        guard_errors=guard_errors,
        failed_saves_in_a_row=failed_saves_in_a_row,
        save_failure=save_failure,
        worker_faults=stats.worker_faults,
        lookup_p50_s=reuse.lookup_p50_s,
        lookup_p99_s=reuse.lookup_p99_s,
        predictions=_predictions(stats),
        benefits=_benefits(stats),
        prefetches=_prefetches(agent),
        break_even_blocks=_break_evens(hierarchy, block_tokens),
    )


def _paths(stats: HierarchyStats, unit_bytes: int) -> dict[str, PathStats]:
    return {
        str(name): PathStats(
            moved_blocks=lane.moved_blocks,
            moved_bytes=lane.moved_bytes * unit_bytes,
            failed_blocks=lane.failed_blocks,
            queued_blocks=lane.queued_blocks,
            bandwidth_bytes_per_s=(lane.bandwidth_bytes_per_s or 0.0) * unit_bytes,
        )
        for name, lane in stats.lanes.items()
    }


def _predictions(stats: HierarchyStats) -> dict[str, PredictionStats]:
    return {
        str(quantity): PredictionStats(predictions=report.predictions, relative_error=report.relative, bias=report.bias)
        for quantity, report in stats.errors.items()
    }


def _benefits(stats: HierarchyStats) -> dict[str, BenefitStats]:
    return {
        f"{src.lower()}_to_{dst.lower()}": BenefitStats(
            worth_blocks=each.worth_blocks,
            not_worth_blocks=each.not_worth_blocks,
            declined_blocks=each.declined_blocks,
            net_benefit_s=each.net_benefit_s,
        )
        for (src, dst), each in stats.benefits.items()
    }


def quotas(
    hierarchy: HierarchyManager,
    *,
    unit_bytes: int = 1,
    exact: Mapping[tuple[str, CacheTier], QuotaBody] | None = None,
) -> Quotas:
    """Return every tenant's use and quota in every tier; any thread. ``exact`` are quotas as they were set."""
    known = exact or {}
    return Quotas(
        tiers={
            tier: {
                tenant: TenantUsageBody(
                    used_blocks=usage.used_blocks,
                    used_bytes=usage.used_bytes * unit_bytes,
                    quota=known.get((tenant, tier)) or _quota_body(usage.quota, unit_bytes),
                    over_burst_blocks=usage.over_burst_blocks,
                    changed=usage.changed,
                )
                for tenant, usage in stats.tenants.items()
            }
            for tier, stats in hierarchy.stats().tiers.items()
        }
    )


def _quota_body(quota: TenantQuota, unit_bytes: int) -> QuotaBody:
    return QuotaBody(
        guaranteed_bytes=quota.guaranteed_bytes * unit_bytes,
        burst_bytes=times(quota.burst_bytes, unit_bytes),
        weight=quota.weight,
    )


def times(count: int | None, unit_bytes: int) -> int | None:
    """Return a bound in bytes, None where there is none."""
    return None if count is None else count * unit_bytes


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
