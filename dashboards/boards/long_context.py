"""A long-context load test: drift, leaks, and the effect of long prompts on other answers."""

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

_HOUR: Final = "needs an hour of load"

_LOAD: Final = Row(
    title="Load",
    panels=(
        number("Requests", "Requests that ended per second.", Shown.REQUESTS_PER_SECOND, rate("kvgate_requests_total")),
        number("In flight", "Requests at instances.", Shown.REQUESTS, "sum(kvgate_requests_in_flight)"),
        number(
            "Prompt tokens",
            "Tokens per second of the fleet.",
            Shown.TOKENS_PER_SECOND,
            rate("kvgate_prompt_tokens_total"),
        ),
        number(
            "Generated tokens",
            "Tokens per second of the fleet.",
            Shown.TOKENS_PER_SECOND,
            rate("kvgate_completion_tokens_total"),
        ),
        number("Failed", "Share that failed on the server side.", Shown.SHARE, "kvgate:request_errors:ratio_rate5m"),
        number(
            "Prompt tokens from cache",
            "Share of cached prompt tokens.",
            Shown.SHARE,
            "kvgate:cached_tokens:ratio_rate5m",
        ),
        lines(
            "Prompt lengths",
            "Prompt lengths, counted by the engines.",
            Shown.TOKENS,
            *quantiles("lmdeploy:request_prompt_tokens"),
        ),
        Panel(
            title="Distribution of the time to first byte",
            about="Requests per second by range. A second band above the first contains requests whose prompt was computed.",
            unit=Shown.SECONDS,
            look=Look.HEATMAP,
            queries=(query(rate("kvgate_first_byte_seconds_bucket", "le"), "{{le}}"),),
        ),
        lines(
            "Time to first byte",
            "For streams, time to first token (TTFT).",
            Shown.SECONDS,
            *quantiles("kvgate_first_byte_seconds"),
        ),
        lines(
            "Inter-token latency, p99",
            "Inter-token latency (ITL): effect of long prefills on other answers.",
            Shown.SECONDS,
            query(quantile(0.99, "lmdeploy:iter_token_latency", "instance"), "{{instance}}"),
        ),
        lines(
            "Time per output token",
            "Mean of each stream.",
            Shown.SECONDS,
            *quantiles("kvgate_time_per_output_token_seconds"),
        ),
        lines(
            "Waiting",
            "Requests waiting in the gateways and in the engines.",
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
            "Time to first byte against an hour ago",
            "Ratio of medians over 10 minutes; 1 means no drift.",
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
            "Resident memory of gateways and api_servers.",
            Shown.BYTES,
            query("sum by (job, instance) (process_resident_memory_bytes)", "{{job}} {{instance}}"),
        ),
        lines(
            "Tasks of the gateways",
            "Tasks; the number falls back when requests end.",
            Shown.COUNT,
            query("sum by (gateway) (kvgate_tasks)", "{{gateway}}"),
        ),
        lines(
            "KV pools in use",
            "Use of HBM by instance; without requests, the cached share.",
            Shown.SHARE,
            query("lmdeploy:gpu_cache_usage_perc", "{{instance}}"),
        ),
        lines(
            "Tiers in use",
            "Share of blocks in use, by instance.",
            Shown.SHARE,
            query("kvgate:tier_used:ratio", "{{instance}} {{tier}}"),
        ),
        lines(
            "Event loop lag, p99",
            "Event-loop lag of the gateways.",
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
            "Prompt tokens found in a tier and not computed again.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_engine_tier_hit_tokens_total", "tier"), "{{tier}}"),
        ),
        lines(
            "Restored and failed",
            "Requests whose KV came from a tier below HBM.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_engine_offload_loads_total"), "restored"),
            query(rate("kvgate_engine_offload_failed_loads_total"), "failed"),
            empty="no tiers below HBM",
        ),
        lines(
            "Between the tiers",
            "Bytes per second by path.",
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
