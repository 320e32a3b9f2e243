"""The tiers below HBM: blocks, tenants, saves and loads, paths, the cost model."""

from typing import Final

from kvcontrol.series.engine.families import counter, gauge
from kvcontrol.series.series import Series, Unit

_TIERS: Final = "with tiers below HBM"

# Tiers.
TIER_CAPACITY = gauge("tier_capacity_blocks", Unit.BLOCKS, "KV blocks that a tier can hold.", "tier")
TIER_USED = gauge("tier_used_blocks", Unit.BLOCKS, "KV blocks that occupy space in a tier.", "tier")
TIER_BLOCK_BYTES = gauge("tier_block_bytes", Unit.BYTES, "Size of a KV block in a tier.", "tier")
TIER_FRAGMENTATION = gauge(
    "tier_fragmentation_ratio",
    Unit.RATIO,
    "Share of a tier's used bytes without reusable KV. In HBM: blocks that are partly filled or belong to one request "
    "alone. Below HBM: bytes lost to rounding to pages.",
    "tier",
    appears="once the tier holds a block",
)
TIER_HIT_TOKENS = counter(
    "tier_hit_tokens",
    Unit.TOKENS,
    "Prompt tokens found in a tier; each token counts for the fastest tier that holds it.",
    "tier",
)
TIER_LOST = counter(
    "tier_lost_blocks",
    Unit.BLOCKS,
    "KV blocks that left a tier, by reason.",
    "tier",
    "reason",
    appears=_TIERS,
)

# Tenants in the tiers below HBM.
TENANT_USED = gauge(
    "tenant_used_bytes", Unit.BYTES, "Bytes of a tenant's KV in a tier.", "tier", "tenant", appears=_TIERS
)
TENANT_GUARANTEED = gauge(
    "tenant_guaranteed_bytes",
    Unit.BYTES,
    "Guaranteed bytes of a tenant: other tenants' blocks never evict it below them.",
    "tier",
    "tenant",
    appears=_TIERS,
)
TENANT_BURST = gauge(
    "tenant_burst_bytes",
    Unit.BYTES,
    "Burst limit of a tenant in bytes: the most that its blocks may occupy.",
    "tier",
    "tenant",
    appears=f"{_TIERS}, for tenants with a burst limit",
)
TENANT_VIOLATIONS = counter(
    "tenant_over_burst_blocks",
    Unit.BLOCKS,
    "Quota violations: blocks evicted or refused because of a tenant's burst limit. A tenant without blocks may lose "
    "its "
    "count; tenant_hit_blocks explains `other`.",
    "tier",
    "tenant",
    appears=_TIERS,
)
TENANT_HITS = counter(
    "tenant_hit_blocks",
    Unit.BLOCKS,
    "Blocks of a tenant that loads found in a tier. `other` is the sum of tenants without a time series of their "
    "own; it "
    "rises or falls when a tenant gains or loses one.",
    "tier",
    "tenant",
    appears=_TIERS,
)

# Offloading and loading.
OFFLOAD_LOADS = counter(
    "offload_loads", Unit.REQUESTS, "Requests whose KV was restored from a tier below HBM.", appears=_TIERS
)
OFFLOAD_FAILED_LOADS = counter(
    "offload_failed_loads",
    Unit.REQUESTS,
    "Requests whose restore failed; the engine computed their tokens.",
    appears=_TIERS,
)
OFFLOAD_DECLINED_LOADS = counter(
    "offload_declined_loads",
    Unit.COUNT,
    "Look-ups whose restore was declined because computing is expected to be faster. A waiting request is looked up "
    "more than once.",
    appears=_TIERS,
)
OFFLOAD_SAVES = counter("offload_saves", Unit.COUNT, "Saves: paths of blocks handed to the tiers.", appears=_TIERS)
OFFLOAD_TAIL_SAVES = counter(
    "offload_tail_saves", Unit.COUNT, "Saves at the end of a request, which include decoded blocks.", appears=_TIERS
)
OFFLOAD_FAILED_SAVES = gauge(
    "offload_failed_saves_in_a_row",
    Unit.COUNT,
    "Consecutive saves that failed without saving a block. From 8 on the tiers accept no saves.",
    appears=_TIERS,
)
OFFLOAD_LOOKED_UP = counter(
    "offload_looked_up_tokens",
    Unit.TOKENS,
    "Prompt tokens missing in HBM and looked up in the tiers below.",
    appears=_TIERS,
)
OFFLOAD_FOUND = counter(
    "offload_found_tokens", Unit.TOKENS, "Looked-up prompt tokens found in a tier below HBM.", appears=_TIERS
)
OFFLOAD_COLLISIONS = counter(
    "offload_collisions",
    Unit.BLOCKS,
    "Blocks with an equal hash and different tokens; they are never used.",
    appears=_TIERS,
)
OFFLOAD_GUARD_ERRORS = counter(
    "offload_guard_errors",
    Unit.COUNT,
    "Exceptions of the connector, contained so that the engine's loop runs on: a defect of kvgate.",
    appears=_TIERS,
)
OFFLOAD_WORKER_FAULTS = counter(
    "offload_worker_faults", Unit.COUNT, "Exceptions of transfer workers: a defect of kvgate.", appears=_TIERS
)
OFFLOAD_BLOCKS = counter(
    "offload_blocks",
    Unit.BLOCKS,
    "KV blocks by requested operation and result.",
    "operation",
    "status",
    "reason",
    appears=f"{_TIERS}, after the first transfer",
)
OFFLOAD_LOOKUP_P50 = gauge(
    "offload_lookup_p50_seconds",
    Unit.SECONDS,
    "Median time that a look-up below HBM blocks the engine's loop, since the start; 0 before the first.",
    appears=_TIERS,
)
OFFLOAD_LOOKUP_P99 = gauge(
    "offload_lookup_p99_seconds",
    Unit.SECONDS,
    "99th percentile of the time that a look-up below HBM blocks the engine's loop.",
    appears=_TIERS,
)
PREFETCH_BLOCKS = counter(
    "prefetch_blocks",
    Unit.BLOCKS,
    "KV blocks prefetched from NVMe, by outcome.",
    "outcome",
    appears=f"{_TIERS} and a prefetch probability",
)

# Paths between the tiers.
PATH_MOVED_BYTES = counter("path_moved_bytes", Unit.BYTES, "Bytes moved between two tiers.", "path", appears=_TIERS)
PATH_FAILED_BLOCKS = counter(
    "path_failed_blocks", Unit.BLOCKS, "KV blocks that failed to move along a path.", "path", appears=_TIERS
)
PATH_QUEUED_BLOCKS = gauge("path_queued_blocks", Unit.BLOCKS, "KV blocks queued for a path.", "path", appears=_TIERS)
PATH_BANDWIDTH = gauge(
    "path_bytes_per_second",
    Unit.BYTES_PER_SECOND,
    "Measured bandwidth of a path, 0 before the first measurement.",
    "path",
    appears=_TIERS,
)

# What the cost model expects.
PREFILL_SPEED = gauge(
    "prefill_tokens_per_second",
    Unit.TOKENS_PER_SECOND,
    "Measured prefill speed, 0 before the first measurement.",
    appears=_TIERS,
)
COST_PREDICTIONS = counter(
    "cost_predictions",
    Unit.COUNT,
    "Predictions of the cost model whose actual time was observed.",
    "quantity",
    appears=_TIERS,
)
COST_ERROR = gauge(
    "cost_relative_error",
    Unit.RATIO,
    "|predicted - actual| / actual of the cost model's times, as a moving average; 0 before the first.",
    "quantity",
    appears=_TIERS,
)
COST_BIAS = gauge(
    "cost_bias_ratio",
    Unit.RATIO,
    "(predicted - actual) / actual of the cost model's times, as a moving average; 0 before the first.",
    "quantity",
    appears=_TIERS,
)
MIGRATION_JUDGED = counter(
    "migration_judged_blocks",
    Unit.BLOCKS,
    "KV blocks whose migration along a path was assessed: worth its cost, not worth it, and declined for that reason.",
    "path",
    "verdict",
    appears=f"{_TIERS}, after the first assessment",
)
MIGRATION_BENEFIT = gauge(
    "migration_net_benefit_seconds",
    Unit.SECONDS,
    "Expected net benefit of the moves so far: seconds saved minus seconds spent.",
    "path",
    appears=f"{_TIERS}, after the first assessment",
)
LOAD_BREAK_EVEN = gauge(
    "load_break_even_blocks",
    Unit.BLOCKS,
    "Least number of blocks for which a load from a tier is faster than computing, -1 if none is.",
    "tier",
    appears=f"{_TIERS}, once both speeds are measured",
)

TIERS: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Series))
"""All of them, as they stand above."""
