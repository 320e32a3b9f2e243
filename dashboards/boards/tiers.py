"""KV tiers and policies: how full, how fast, what is found where, what is decided, what other policies would find."""

from typing import Final

from dashboards.panel import Board, Query, Row, Shown, lines, query, rate, stacked

_ALL: Final = 'instance=~"$instance"'
_TIERS: Final = "no tiers below HBM"
_ADAPTIVE: Final = "adaptive is not in charge of HBM"


def _rate(series: str, by: str, legend: str) -> Query:
    return query(rate(f"kvgate_engine_{series}", by, _ALL), legend)


def _now(series: str, legend: str, how: str = "sum", by: str = "") -> Query:
    return query(f"{how} by ({by}) (kvgate_engine_{series}{{{_ALL}}})", legend)


_SPACE: Final = Row(
    title="Space",
    panels=(
        lines(
            "Utilisation",
            "Share of a tier's blocks that take room. A cache that works is full.",
            Shown.SHARE,
            query(
                f"sum by (instance, tier) (kvgate_engine_tier_used_blocks{{{_ALL}}}) / sum by (instance, tier) (kvgate_engine_tier_capacity_blocks{{{_ALL}}})",
                "{{instance}} {{tier}}",
            ),
        ),
        stacked(
            "Bytes in use",
            "Blocks by their size.",
            Shown.BYTES,
            query(
                f"sum by (tier) (kvgate_engine_tier_used_blocks{{{_ALL}}} * on (instance, tier) kvgate_engine_tier_block_bytes{{{_ALL}}})",
                "{{tier}}",
            ),
        ),
        lines(
            "Fragmentation",
            "Share of the used bytes that no later request can reuse: in HBM partly filled blocks and those of one request alone, below what rounding costs.",
            Shown.SHARE,
            _now("tier_fragmentation_ratio", "{{instance}} {{tier}}", how="max", by="instance, tier"),
        ),
        stacked(
            "Hit tokens by tier",
            "Prompt tokens found, each counted for the fastest tier that had it.",
            Shown.TOKENS_PER_SECOND,
            _rate("tier_hit_tokens_total", "tier", "{{tier}}"),
        ),
        lines(
            "Blocks that left, by reason",
            "evicted: still in another tier. evicted_last: gone, there was too little room. corrupt and failed speak of the device.",
            Shown.BLOCKS_PER_SECOND,
            _rate("tier_lost_blocks_total", "tier, reason", "{{tier}} {{reason}}"),
            empty="no block has left a tier",
        ),
        lines(
            "Reusable blocks",
            "What a later request can reuse.",
            Shown.BLOCKS,
            _now("resident_blocks", "{{instance}} {{tier}}", by="instance, tier"),
        ),
        lines(
            "Pinned blocks",
            "Of prefixes that stay, whatever comes: room that nothing else has.",
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
            "Of the time in which a path was busy, 0 before.",
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
            "Blocks that a path failed to move: a device in trouble.",
            Shown.BLOCKS_PER_SECOND,
            _rate("path_failed_blocks_total", "path", "{{path}}"),
            empty=_TIERS,
        ),
        lines(
            "Restores",
            "Requests restored from below HBM, those that failed and were computed, look-ups where computing was faster.",
            Shown.REQUESTS_PER_SECOND,
            _rate("offload_loads_total", "", "restored"),
            _rate("offload_failed_loads_total", "", "failed"),
            _rate("offload_declined_loads_total", "", "declined"),
            empty=_TIERS,
        ),
        lines(
            "Saves",
            "Paths of blocks given to the tiers; tails are saved at a request's end.",
            Shown.PER_SECOND,
            _rate("offload_saves_total", "", "all"),
            _rate("offload_tail_saves_total", "", "tails"),
            empty=_TIERS,
        ),
        lines(
            "Looked up and found below HBM",
            "Prompt tokens; per look-up.",
            Shown.TOKENS_PER_SECOND,
            _rate("offload_looked_up_tokens_total", "", "looked up"),
            _rate("offload_found_tokens_total", "", "found"),
            empty=_TIERS,
        ),
        lines(
            "What a look-up holds the engine's loop",
            "Since the start.",
            Shown.SECONDS,
            _now("offload_lookup_p50_seconds", "p50 {{instance}}", "max", "instance"),
            _now("offload_lookup_p99_seconds", "p99 {{instance}}", "max", "instance"),
            empty=_TIERS,
        ),
        lines(
            "Blocks by how it ended",
            "What was asked (save, load, prefetch, demote), and why it ended so.",
            Shown.BLOCKS_PER_SECOND,
            _rate(
                "offload_blocks_total",
                "operation, status, reason",
                "{{operation}} {{status}} {{reason}}",
            ),
            empty="nothing was moved",
        ),
        lines(
            "Equal hashes over other tokens",
            "Counted and never used.",
            Shown.BLOCKS_PER_SECOND,
            _rate("offload_collisions_total", "", "collisions"),
            empty=_TIERS,
        ),
        lines(
            "Prefetched",
            "Brought up from NVMe ahead; used or wasted.",
            Shown.BLOCKS_PER_SECOND,
            _rate("prefetch_blocks_total", "outcome", "{{outcome}}"),
            empty="prefetching is switched off",
        ),
    ),
)

_COSTS: Final = Row(
    title="What the cost model expects",
    panels=(
        lines(
            "Error",
            "|predicted - actual| / actual, fading.",
            Shown.SHARE,
            _now("cost_relative_error", "{{instance}} {{quantity}}", "max", "instance, quantity"),
            empty=_TIERS,
        ),
        lines(
            "Bias",
            "The same with its sign: above 0 it predicts too much.",
            Shown.SHARE,
            _now("cost_bias_ratio", "{{instance}} {{quantity}}", "max", "instance, quantity"),
            empty=_TIERS,
        ),
        lines(
            "Predictions whose outcome was seen",
            "What the errors are averages of.",
            Shown.PER_SECOND,
            _rate("cost_predictions_total", "quantity", "{{quantity}}"),
            empty=_TIERS,
        ),
        lines(
            "Moves judged",
            "Blocks whose way down was worth it, was not, and was declined therefore.",
            Shown.BLOCKS_PER_SECOND,
            _rate("migration_judged_blocks_total", "path, verdict", "{{path}} {{verdict}}"),
            empty="no move was judged yet",
        ),
        lines(
            "Expected benefit of the moves made",
            "Seconds saved, less what they cost.",
            Shown.SECONDS,
            _now("migration_net_benefit_seconds", "{{instance}} {{path}}", by="instance, path"),
            empty="no move was judged yet",
        ),
        lines(
            "Break-even of a load",
            "From so many blocks on loading beats computing; -1: never.",
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
            "Which policy chooses what leaves a tier; lmdeploy: ours failed, see the log.",
            Shown.STATE,
            _now("policy_in_charge", "{{instance}} {{tier}}: {{policy}}", how="max", by="instance, tier, policy"),
        ),
        lines(
            "Blocks that policies chose",
            "What they evicted.",
            Shown.BLOCKS_PER_SECOND,
            _rate("policy_evicted_blocks_total", "tier", "{{tier}}"),
        ),
        lines(
            "Exchanges",
            "Policies exchanged while running, and changes that were refused.",
            Shown.TIMES,
            query(f"sum by (tier) (kv_policy_swaps_total{{{_ALL}}})", "{{tier}}"),
            query(f"sum (kv_policy_refused_swaps_total{{{_ALL}}})", "refused"),
        ),
        lines(
            "What shadows would find",
            "Share of sampled blocks in the last whole minute. A candidate well above the one in charge is worth a swap.",
            Shown.SHARE,
            _now("shadow_hit_ratio", "{{policy}}", "avg", "policy"),
            empty="no whole minute with look-ups yet",
        ),
        lines(
            "The same since the start",
            "Hits by look-ups.",
            Shown.SHARE,
            query(
                f"sum by (policy) (kvgate_engine_shadow_hits_total{{{_ALL}}}) / sum by (policy) (kvgate_engine_shadow_lookups_total{{{_ALL}}})",
                "{{policy}}",
            ),
        ),
        lines(
            "What shadows followed",
            "Requests followed, and left out for the sake of their limit.",
            Shown.REQUESTS_PER_SECOND,
            _rate("shadow_requests_total", "", "followed"),
            _rate("shadow_skipped_total", "", "left out"),
        ),
        lines(
            "What shadows cost",
            "Of the engine's thread; bounded at 1 % of a core.",
            Shown.SHARE,
            _rate("shadow_busy_seconds_total", "instance", "{{instance}}"),
        ),
        lines(
            "Adaptive: its weight",
            "1 is LRU; higher, blocks that came again stay longer.",
            Shown.TIMES,
            _now("adaptive_weight", "{{instance}}", "max", "instance"),
            empty=_ADAPTIVE,
        ),
        lines(
            "Adaptive: its hits and LRU's",
            "Prompt tokens found; what it gains is what it may risk.",
            Shown.TOKENS_PER_SECOND,
            _rate("adaptive_hits_total", "", "adaptive"),
            _rate("adaptive_lru_hits_total", "", "LRU would have found"),
            empty=_ADAPTIVE,
        ),
        lines(
            "Adaptive: changes of weight",
            "Many say that the traffic has no steady shape.",
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
