"""A long-context load test: does anything drift or leak, and what do long prompts do to others' tokens?"""

from typing import Final

from dashboards.panel import (
    Board,
    Look,
    Panel,
    Proof,
    Row,
    Shown,
    lines,
    number,
    quantile,
    quantiles,
    query,
    quiet,
    rate,
    stacked,
)

_HOUR: Final = "an hour of load is needed"

_LOAD: Final = Row(
    title="Load",
    panels=(
        number("Requests", "That ended, a second.", Shown.REQUESTS_PER_SECOND, rate("kvgate_requests_total")),
        number("In flight", "At instances.", Shown.REQUESTS, "sum(kvgate_requests_in_flight)"),
        number(
            "Prompt tokens", "A second, over the fleet.", Shown.TOKENS_PER_SECOND, rate("kvgate_prompt_tokens_total")
        ),
        number(
            "Generated tokens",
            "A second, over the fleet.",
            Shown.TOKENS_PER_SECOND,
            rate("kvgate_completion_tokens_total"),
        ),
        number("Failed", "Share that failed on our side.", Shown.SHARE, "kvgate:request_errors:ratio_rate5m"),
        number("Prompt tokens from cache", "Share.", Shown.SHARE, "kvgate:cached_tokens:ratio_rate5m"),
        lines("Prompt lengths", "As engines saw them.", Shown.TOKENS, *quantiles("lmdeploy:request_prompt_tokens")),
        Panel(
            title="Time to the first byte",
            about="How many requests a second fell into which range: a second band above the first is those that were computed.",
            unit=Shown.SECONDS,
            look=Look.HEATMAP,
            queries=(query(rate("kvgate_first_byte_seconds_bucket", "le"), "{{le}}"),),
        ),
        lines(
            "To the first byte", "For streams, the first token.", Shown.SECONDS, *quantiles("kvgate_first_byte_seconds")
        ),
        lines(
            "Between tokens, p99",
            "ITL: what long prefills do to others' answers.",
            Shown.SECONDS,
            query(quantile(0.99, "lmdeploy:iter_token_latency", "instance"), "{{instance}}"),
        ),
        lines(
            "Per output token", "Each stream's mean.", Shown.SECONDS, *quantiles("kvgate_time_per_output_token_seconds")
        ),
        lines(
            "Waiting",
            "In the gateways, and in the engines.",
            Shown.REQUESTS,
            query("sum(kvgate_requests_waiting)", "gateways"),
            query("sum(lmdeploy:num_requests_waiting)", "engines"),
        ),
    ),
)

_DRIFT: Final = Row(
    title="Drift and leaks",
    panels=(
        lines(
            "First byte against an hour ago",
            "Medians over 10 minutes: 1 is no drift.",
            Shown.TIMES,
            quiet(
                _HOUR,
                Proof.NONE,
                "histogram_quantile(0.5, sum by (le) (rate(kvgate_first_byte_seconds_bucket[10m]))) / histogram_quantile(0.5, sum by (le) (rate(kvgate_first_byte_seconds_bucket[10m] offset 1h)))",
                "median",
            ),
            empty=_HOUR,
        ),
        lines(
            "Main memory",
            "Gateways and api_servers.",
            Shown.BYTES,
            query("sum by (job, instance) (process_resident_memory_bytes)", "{{job}} {{instance}}"),
        ),
        lines(
            "Tasks of the gateways",
            "They return when requests have ended.",
            Shown.COUNT,
            query("sum by (gateway) (kvgate_tasks)", "{{gateway}}"),
        ),
        lines(
            "KV pools in use",
            "HBM, by instance; without requests, what is cached.",
            Shown.SHARE,
            query("lmdeploy:gpu_cache_usage_perc", "{{instance}}"),
        ),
        lines("Tiers in use", "By instance.", Shown.SHARE, query("kvgate:tier_used:ratio", "{{instance}} {{tier}}")),
        lines(
            "Event loop lag, p99",
            "Of the gateways.",
            Shown.SECONDS,
            query(quantile(0.99, "kvgate_event_loop_lag_seconds", "gateway"), "{{gateway}}"),
        ),
    ),
)

_REUSE: Final = Row(
    title="Reuse",
    panels=(
        stacked(
            "Hit tokens by tier",
            "Prompt tokens that were not computed again.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_engine_tier_hit_tokens_total", "tier"), "{{tier}}"),
        ),
        lines(
            "Restored and failed",
            "Requests whose KV came from below HBM.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_engine_offload_loads_total"), "restored"),
            query(rate("kvgate_engine_offload_failed_loads_total"), "failed"),
            empty="no tiers below HBM",
        ),
        lines(
            "Between the tiers",
            "Bytes a second by path.",
            Shown.BYTES_PER_SECOND,
            query(rate("kvgate_engine_path_moved_bytes_total", "path"), "{{path}}"),
            empty="no tiers below HBM",
        ),
    ),
)

BOARD: Final = Board(
    uid="kvgate-long-context",
    title="kvgate: long-context load",
    about="For load tests with long prompts: latency, drift, leaks and reuse.",
    rows=(_LOAD, _DRIFT, _REUSE),
)
