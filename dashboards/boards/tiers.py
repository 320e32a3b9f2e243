"""KV tiers and policies: occupancy, bandwidth, hits, decisions, and the hit ratios of shadow policies."""

from typing import Final

from dashboards.panel import Board, Query, Row, Shown, lines, query, rate, stacked

_ALL: Final = 'instance=~"$instance"'
_TIERS: Final = "no tiers below HBM"
_ADAPTIVE: Final = "the policy of HBM is not adaptive"


def _rate(series: str, by: str, legend: str) -> Query:
    return query(rate(f"kvgate_engine_{series}", by, _ALL), legend)


def _now(series: str, legend: str, how: str = "sum", by: str = "") -> Query:
    return query(f"{how} by ({by}) (kvgate_engine_{series}{{{_ALL}}})", legend)


_SPACE: Final = Row(
    title="Space",
    panels=(
        lines(
            "Utilisation",
            "Share of a tier's blocks in use. A working cache is full.",
            Shown.SHARE,
            query(
                f"sum by (instance, tier) (kvgate_engine_tier_used_blocks{{{_ALL}}}) / sum by (instance, tier) (kvgate_engine_tier_capacity_blocks{{{_ALL}}})",
                "{{instance}} {{tier}}",
            ),
        ),
        stacked(
            "Bytes in use",
            "Used blocks times their size.",
            Shown.BYTES,
            query(
                f"sum by (tier) (kvgate_engine_tier_used_blocks{{{_ALL}}} * on (instance, tier) kvgate_engine_tier_block_bytes{{{_ALL}}})",
                "{{tier}}",
            ),
        ),
        lines(
            "Fragmentation",
            "Share of used bytes without reusable KV. In HBM: partly filled blocks and blocks of one request alone. Below: rounding.",
            Shown.SHARE,
            _now("tier_fragmentation_ratio", "{{instance}} {{tier}}", how="max", by="instance, tier"),
        ),
        stacked(
            "Hit tokens by tier",
            "Prompt tokens found; each token counts for the fastest tier that holds it.",
            Shown.TOKENS_PER_SECOND,
            _rate("tier_hit_tokens_total", "tier", "{{tier}}"),
        ),
        lines(
            "Blocks that left, by reason",
            "evicted: another tier still has the block. evicted_last: the last copy left. corrupt, failed: check the device.",
            Shown.BLOCKS_PER_SECOND,
            _rate("tier_lost_blocks_total", "tier, reason", "{{tier}} {{reason}}"),
            empty="no block has left a tier",
        ),
        lines(
            "Reusable blocks",
            "Blocks that later requests can reuse.",
            Shown.BLOCKS,
            _now("resident_blocks", "{{instance}} {{tier}}", by="instance, tier"),
        ),
        lines(
            "Pinned blocks",
            "Blocks of pinned prefixes, which no policy evicts.",
            Shown.BLOCKS,
            _now("pinned_blocks", "{{instance}} {{tier}}", by="instance, tier"),
        ),
    ),
)

_MOVING: Final = Row(
    title="Moving",
    panels=(
        stacked(
            "Moved bytes by path",
            "Migration between tiers.",
            Shown.BYTES_PER_SECOND,
            _rate("path_moved_bytes_total", "path", "{{path}}"),
            empty=_TIERS,
        ),
        lines(
            "Measured bandwidth",
            "Bandwidth while the path was busy, 0 before the first transfer.",
            Shown.BYTES_PER_SECOND,
            _now("path_bytes_per_second", "{{instance}} {{path}}", "max", "instance, path"),
            empty=_TIERS,
        ),
        lines(
            "Waiting for a path",
            "Blocks in the queue.",
            Shown.BLOCKS,
            _now("path_queued_blocks", "{{instance}} {{path}}", by="instance, path"),
            empty=_TIERS,
        ),
        lines(
            "Failed moves",
            "Blocks that failed to move along a path; check the device.",
            Shown.BLOCKS_PER_SECOND,
            _rate("path_failed_blocks_total", "path", "{{path}}"),
            empty=_TIERS,
        ),
        lines(
            "Restores",
            "Requests restored from below HBM, failed restores (computed instead), and look-ups declined because computing is faster.",
            Shown.REQUESTS_PER_SECOND,
            _rate("offload_loads_total", "", "restored"),
            _rate("offload_failed_loads_total", "", "failed"),
            _rate("offload_declined_loads_total", "", "declined"),
            empty=_TIERS,
        ),
        lines(
            "Saves",
            "Paths of blocks handed to the tiers; tails are saved at a request's end.",
            Shown.PER_SECOND,
            _rate("offload_saves_total", "", "all"),
            _rate("offload_tail_saves_total", "", "tails"),
            empty=_TIERS,
        ),
        lines(
            "Looked up and found below HBM",
            "Prompt tokens per look-up.",
            Shown.TOKENS_PER_SECOND,
            _rate("offload_looked_up_tokens_total", "", "looked up"),
            _rate("offload_found_tokens_total", "", "found"),
            empty=_TIERS,
        ),
        lines(
            "Time of a look-up in the engine's loop",
            "Percentiles since the start.",
            Shown.SECONDS,
            _now("offload_lookup_p50_seconds", "p50 {{instance}}", "max", "instance"),
            _now("offload_lookup_p99_seconds", "p99 {{instance}}", "max", "instance"),
            empty=_TIERS,
        ),
        lines(
            "Blocks by result",
            "Operation (save, load, prefetch, demote), result and reason.",
            Shown.BLOCKS_PER_SECOND,
            _rate(
                "offload_blocks_total",
                "operation, status, reason",
                "{{operation}} {{status}} {{reason}}",
            ),
            empty="nothing was moved",
        ),
        lines(
            "Hash collisions",
            "Blocks with an equal hash and different tokens; they are never used.",
            Shown.BLOCKS_PER_SECOND,
            _rate("offload_collisions_total", "", "collisions"),
            empty=_TIERS,
        ),
        lines(
            "Prefetched",
            "Blocks prefetched from NVMe: used or wasted.",
            Shown.BLOCKS_PER_SECOND,
            _rate("prefetch_blocks_total", "outcome", "{{outcome}}"),
            empty="prefetching is switched off",
        ),
    ),
)

_COSTS: Final = Row(
    title="Cost model",
    panels=(
        lines(
            "Error",
            "|predicted - actual| / actual, moving average.",
            Shown.SHARE,
            _now("cost_relative_error", "{{instance}} {{quantity}}", "max", "instance, quantity"),
            empty=_TIERS,
        ),
        lines(
            "Bias",
            "(predicted - actual) / actual, moving average. Above 0 the model predicts too much.",
            Shown.SHARE,
            _now("cost_bias_ratio", "{{instance}} {{quantity}}", "max", "instance, quantity"),
            empty=_TIERS,
        ),
        lines(
            "Observed predictions",
            "Predictions that enter the error.",
            Shown.PER_SECOND,
            _rate("cost_predictions_total", "quantity", "{{quantity}}"),
            empty=_TIERS,
        ),
        lines(
            "Assessed moves",
            "Blocks whose move down was worth its cost, was not, and was declined for that reason.",
            Shown.BLOCKS_PER_SECOND,
            _rate("migration_judged_blocks_total", "path, verdict", "{{path}} {{verdict}}"),
            empty="no move was assessed yet",
        ),
        lines(
            "Expected benefit of moves",
            "Seconds saved minus seconds spent.",
            Shown.SECONDS,
            _now("migration_net_benefit_seconds", "{{instance}} {{path}}", by="instance, path"),
            empty="no move was assessed yet",
        ),
        lines(
            "Break-even of a load",
            "Least number of blocks for which loading is faster than computing; -1: never.",
            Shown.BLOCKS,
            _now(
                "load_break_even_blocks",
                "{{instance}} {{tier}}",
                "max",
                "instance, tier",
            ),
            empty="not measured yet",
        ),
    ),
)

_POLICIES: Final = Row(
    title="Policies",
    panels=(
        lines(
            "In charge",
            "Policy that chooses a tier's eviction victims; lmdeploy: kvgate's policy failed, see the log.",
            Shown.STATE,
            _now("policy_in_charge", "{{instance}} {{tier}}: {{policy}}", how="max", by="instance, tier, policy"),
        ),
        lines(
            "Eviction victims",
            "Blocks chosen by policies.",
            Shown.BLOCKS_PER_SECOND,
            _rate("policy_evicted_blocks_total", "tier", "{{tier}}"),
        ),
        lines(
            "Policy swaps",
            "Policy swaps in running instances, and refused swaps.",
            Shown.TIMES,
            query(f"sum by (tier) (kv_policy_swaps_total{{{_ALL}}})", "{{tier}}"),
            query(f"sum (kv_policy_refused_swaps_total{{{_ALL}}})", "refused"),
        ),
        lines(
            "Shadow hit ratio, last window",
            "Share of sampled blocks found in the last complete window. A candidate well above the present policy is worth a swap.",
            Shown.SHARE,
            _now("shadow_hit_ratio", "{{policy}}", "avg", "policy"),
            empty="no complete window with look-ups yet",
        ),
        lines(
            "Shadow hit ratio, since the start",
            "Hits divided by look-ups.",
            Shown.SHARE,
            query(
                f"sum by (policy) (kvgate_engine_shadow_hits_total{{{_ALL}}}) / sum by (policy) (kvgate_engine_shadow_lookups_total{{{_ALL}}})",
                "{{policy}}",
            ),
        ),
        lines(
            "Shadow requests",
            "Requests replayed, and requests skipped because of the limit.",
            Shown.REQUESTS_PER_SECOND,
            _rate("shadow_requests_total", "", "replayed"),
            _rate("shadow_skipped_total", "", "skipped"),
        ),
        lines(
            "Shadow time",
            "Share of the engine's thread; at most 1 % of a core.",
            Shown.SHARE,
            _rate("shadow_busy_seconds_total", "instance", "{{instance}}"),
        ),
        lines(
            "Adaptive: weight",
            "1 is LRU. With higher values, reused blocks stay longer.",
            Shown.TIMES,
            _now("adaptive_weight", "{{instance}}", "max", "instance"),
            empty=_ADAPTIVE,
        ),
        lines(
            "Adaptive: hits beside LRU's",
            "Prompt tokens found; the gain over LRU bounds the risk.",
            Shown.TOKENS_PER_SECOND,
            _rate("adaptive_hits_total", "", "adaptive"),
            _rate("adaptive_lru_hits_total", "", "LRU would have found"),
            empty=_ADAPTIVE,
        ),
        lines(
            "Adaptive: changes of weight",
            "Many changes indicate unsteady traffic.",
            Shown.TIMES,
            _now("adaptive_switches_total", "{{instance}}", by="instance"),
            empty=_ADAPTIVE,
        ),
    ),
)

BOARD: Final = Board(
    uid="kvgate-tiers",
    title="kvgate: KV tiers and policies",
    about="Space, transfers, costs and policies of the KV tiers.",
    rows=(_SPACE, _MOVING, _COSTS, _POLICIES),
    by_instance=True,
)
