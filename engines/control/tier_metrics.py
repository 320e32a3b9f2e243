"""The tiers' series on an instance's ``/metrics``; the counts come from the engine process."""

from collections.abc import Callable, Iterator, Mapping
from heapq import nlargest

import msgspec
from prometheus_client.core import Metric

from engines.control.families import family, single
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import OffloadStats, TierStats
from kvcontrol.kv_runtime import HierarchyManager
from kvcontrol.series import MOST_TENANTS, OTHER
from kvcontrol.series.engine import tiers as catalogue
from kvcontrol.tier_report import times


class TenantCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant in one tier, for ``/metrics``; ``burst_bytes`` None is all of the tier."""

    used_bytes: int
    guaranteed_bytes: int
    burst_bytes: int | None
    over_burst_blocks: int
    hit_blocks: int


class TierCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one tier beside its ``TierStats``; ``bounded`` limits the number of ``tenants``."""

    hit_tokens: int
    fragmentation_ratio: float | None = None
    tenants: dict[str, TenantCounts] = {}


def tier_counts(
    hierarchy: HierarchyManager, *, block_tokens: int, unit_bytes: int = 1, padded: Callable[[int], int] | None = None
) -> dict[CacheTier, TierCounts]:
    """Return hits and tenants of the tiers below HBM; any thread.

    ``unit_bytes`` is what the runtime takes for one byte, ``padded`` how many bytes a block of so many takes on disk
    (None: nobody knows).
    """
    return {
        tier: TierCounts(
            hit_tokens=sum(stats.hits.values()) * block_tokens,
            fragmentation_ratio=None if padded is None else 1 - stats.block_bytes / padded(stats.block_bytes),
            tenants=bounded(
                {
                    tenant: TenantCounts(
                        used_bytes=usage.used_bytes * unit_bytes,
                        guaranteed_bytes=usage.quota.guaranteed_bytes * unit_bytes,
                        burst_bytes=times(usage.quota.burst_bytes, unit_bytes),
                        over_burst_blocks=usage.over_burst_blocks,
                        hit_blocks=stats.hits.get(tenant, 0),
                    )
                    for tenant, usage in stats.tenants.items()
                }
            ),
        )
        for tier, stats in hierarchy.stats().tiers.items()
    }


def hbm_counts(hbm: TierStats, *, hit_tokens: int) -> TierCounts:
    """Return what an engine's own memory found. Fragmentation is of blocks in use that the prefix cache doesn't have:
    partly filled ones, and those of one request alone.
    """
    return TierCounts(
        hit_tokens=hit_tokens,
        fragmentation_ratio=max(0.0, 1 - hbm.cached_blocks / hbm.used_blocks) if hbm.used_blocks else None,
    )


def bounded(tenants: Mapping[str, TenantCounts]) -> dict[str, TenantCounts]:
    """Return the tenants that get series of their own: those with a guarantee or most bytes; the rest is one."""
    if len(tenants) <= MOST_TENANTS:
        return dict(tenants)

    def rank(name: str) -> tuple[int, int]:
        return tenants[name].guaranteed_bytes, tenants[name].used_bytes

    kept = nlargest(MOST_TENANTS, tenants, key=rank)
    rest = [tenants[name] for name in tenants.keys() - set(kept)]
    return {name: tenants[name] for name in kept} | {
        OTHER: TenantCounts(
            used_bytes=sum(each.used_bytes for each in rest),
            guaranteed_bytes=sum(each.guaranteed_bytes for each in rest),
            burst_bytes=None,
            over_burst_blocks=sum(each.over_burst_blocks for each in rest),
            hit_blocks=sum(each.hit_blocks for each in rest),
        )
    }


def tier_series(tiers: Mapping[CacheTier, TierStats], counts: Mapping[CacheTier, TierCounts]) -> Iterator[Metric]:
    """Yield the metrics of every instance: of its pool, and of the tiers below if there are any."""
    yield family(catalogue.TIER_CAPACITY, (((tier.value,), each.capacity_blocks) for tier, each in tiers.items()))
    yield family(catalogue.TIER_USED, (((tier.value,), each.used_blocks) for tier, each in tiers.items()))
    yield family(catalogue.TIER_BLOCK_BYTES, (((tier.value,), each.block_bytes) for tier, each in tiers.items()))
    yield family(catalogue.TIER_HIT_TOKENS, (((tier.value,), each.hit_tokens) for tier, each in counts.items()))
    yield family(
        catalogue.TIER_FRAGMENTATION,
        (
            ((tier.value,), each.fragmentation_ratio)
            for tier, each in counts.items()
            if each.fragmentation_ratio is not None
        ),
    )


def tenant_series(counts: Mapping[CacheTier, TierCounts]) -> Iterator[Metric]:
    """Yield the tenants' metrics of the tiers below HBM."""
    rows = [((tier.value, name), each) for tier, tier_ in counts.items() for name, each in tier_.tenants.items()]
    yield family(catalogue.TENANT_USED, ((labels, each.used_bytes) for labels, each in rows))
    yield family(catalogue.TENANT_GUARANTEED, ((labels, each.guaranteed_bytes) for labels, each in rows))
    yield family(
        catalogue.TENANT_BURST, ((labels, each.burst_bytes) for labels, each in rows if each.burst_bytes is not None)
    )
    yield family(catalogue.TENANT_VIOLATIONS, ((labels, each.over_burst_blocks) for labels, each in rows))
    yield family(catalogue.TENANT_HITS, ((labels, each.hit_blocks) for labels, each in rows))


def offload_series(offload: OffloadStats) -> Iterator[Metric]:
    """Yield the transfers' metrics of the tiers below HBM."""
    for series, value in (
        (catalogue.OFFLOAD_LOADS, offload.loads),
        (catalogue.OFFLOAD_FAILED_LOADS, offload.failed_loads),
        (catalogue.OFFLOAD_DECLINED_LOADS, offload.declined_loads),
        (catalogue.OFFLOAD_SAVES, offload.saves),
        (catalogue.OFFLOAD_TAIL_SAVES, offload.tail_saves),
        (catalogue.OFFLOAD_FAILED_SAVES, offload.failed_saves_in_a_row),
        (catalogue.OFFLOAD_LOOKED_UP, offload.looked_up_tokens),
        (catalogue.OFFLOAD_FOUND, offload.found_tokens),
        (catalogue.OFFLOAD_COLLISIONS, offload.collisions),
        (catalogue.OFFLOAD_GUARD_ERRORS, offload.guard_errors),
        (catalogue.OFFLOAD_WORKER_FAULTS, offload.worker_faults),
        (catalogue.PREFILL_SPEED, offload.prefill_tokens_per_s),
        (catalogue.OFFLOAD_LOOKUP_P50, offload.lookup_p50_s),
        (catalogue.OFFLOAD_LOOKUP_P99, offload.lookup_p99_s),
    ):
        yield single(series, value)
    yield family(catalogue.OFFLOAD_BLOCKS, ((tuple(name.split(":")), n) for name, n in offload.outcomes.items()))
    yield family(catalogue.TIER_LOST, ((tuple(name.split(":")), n) for name, n in offload.losses.items()))
    paths = offload.paths
    yield family(catalogue.PATH_MOVED_BYTES, (((path,), each.moved_bytes) for path, each in paths.items()))
    yield family(catalogue.PATH_FAILED_BLOCKS, (((path,), each.failed_blocks) for path, each in paths.items()))
    yield family(catalogue.PATH_QUEUED_BLOCKS, (((path,), each.queued_blocks) for path, each in paths.items()))
    yield family(catalogue.PATH_BANDWIDTH, (((path,), each.bandwidth_bytes_per_s) for path, each in paths.items()))
    yield from _cost_series(offload)


def _cost_series(offload: OffloadStats) -> Iterator[Metric]:
    errors = offload.predictions
    yield family(catalogue.COST_PREDICTIONS, (((what,), each.predictions) for what, each in errors.items()))
    yield family(catalogue.COST_ERROR, (((what,), each.relative_error) for what, each in errors.items()))
    yield family(catalogue.COST_BIAS, (((what,), each.bias) for what, each in errors.items()))
    yield family(
        catalogue.MIGRATION_JUDGED,
        (
            ((path, verdict), blocks)
            for path, made in offload.benefits.items()
            for verdict, blocks in (
                ("worth", made.worth_blocks),
                ("not_worth", made.not_worth_blocks),
                ("declined", made.declined_blocks),
            )
        ),
    )
    yield family(
        catalogue.MIGRATION_BENEFIT, (((path,), made.net_benefit_s) for path, made in offload.benefits.items())
    )
    yield family(
        catalogue.LOAD_BREAK_EVEN, (((tier.value,), blocks) for tier, blocks in offload.break_even_blocks.items())
    )
    yield family(catalogue.PREFETCH_BLOCKS, (((what,), blocks) for what, blocks in offload.prefetches.items()))
