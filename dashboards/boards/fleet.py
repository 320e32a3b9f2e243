"""The whole fleet on one page: traffic, latency, routing, instances, the gateway's own process."""

from typing import Final

from dashboards.panel import (
    Board,
    Proof,
    Row,
    Shown,
    lines,
    mean,
    number,
    quantile,
    quantiles,
    query,
    quiet,
    rate,
    stacked,
)

_NONE_SHED: Final = "no request was refused"
_NONE_TRIED: Final = "no request was retried"
_NONE_REPAIRED: Final = "no residency was resynchronized"
_NONE_FAILED: Final = "no loop has failed"
_EQUAL: Final = "no prefill instance"
_STREAMS: Final = "no stream under a policy that predicts seconds"

_TRAFFIC: Final = Row(
    title="Traffic",
    panels=(
        number(
            "Requests",
            "Inference requests that ended per second.",
            Shown.REQUESTS_PER_SECOND,
            rate("kvgate_requests_total"),
        ),
        number(
            "Usable instances",
            "Instances that at least one gateway reports as healthy.",
            Shown.COUNT,
            'sum(max by (instance) (kvgate_instance_state{state="healthy"}))',
        ),
        number(
            "First byte, p95",
            "Time from arrival to the engine's first byte.",
            Shown.SECONDS,
            quantile(0.95, "kvgate_first_byte_seconds"),
        ),
        number(
            "Prompt tokens from cache",
            "Share of prompt tokens that engines report as cached.",
            Shown.SHARE,
            f"{rate('kvgate_cached_tokens_total')} / {rate('kvgate_prompt_tokens_total')}",
        ),
        number("In flight", "Requests in flight at instances.", Shown.REQUESTS, "sum(kvgate_requests_in_flight)"),
        number(
            "Waiting",
            "Requests waiting in the gateways for an admission slot.",
            Shown.REQUESTS,
            "sum(kvgate_requests_waiting)",
        ),
        stacked(
            "Requests by outcome",
            "client_error: 4xx caused by the client; refused: 503, no usable instance; shed: 429 by quota or saturation; "
            "upstream_error: failure of an engine; deadline: the request's deadline passed.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_requests_total", "outcome"), "{{outcome}}"),
        ),
        stacked(
            "Requests by operation",
            "Requests by API route.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_requests_total", "operation"), "{{operation}}"),
        ),
        stacked(
            "Requests by model",
            "`other`: models that no instance serves.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_model_requests_total", "model"), "{{model}}"),
        ),
        stacked(
            "Tokens",
            "Tokens, counted by the engines.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_prompt_tokens_total"), "prompt"),
            query(rate("kvgate_completion_tokens_total"), "completion"),
        ),
        lines(
            "Refused before sending, by reason",
            "Quota exceeded, queue full, queue time-out, or no usable instance.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_shed_requests_total", "reason"), "{{reason}}"),
            empty=_NONE_SHED,
        ),
        lines(
            "Retries, by cause",
            "Retries on another instance before the first byte.",
            Shown.REQUESTS_PER_SECOND,
            quiet(_NONE_TRIED, Proof.ACCIDENTS, rate("kvgate_retries_total", "cause"), "{{cause}}"),
            empty=_NONE_TRIED,
        ),
    ),
)

_LATENCY: Final = Row(
    title="Latency",
    panels=(
        lines(
            "Time to first byte",
            "For streams, time to first token (TTFT). Exemplars link to traces.",
            Shown.SECONDS,
            *quantiles("kvgate_first_byte_seconds"),
        ),
        lines(
            "Request duration",
            "Time from arrival to the end of the answer.",
            Shown.SECONDS,
            *quantiles("kvgate_request_seconds"),
        ),
        lines(
            "Time per output token",
            "Mean time between the tokens of a stream (TPOT).",
            Shown.SECONDS,
            *quantiles("kvgate_time_per_output_token_seconds"),
        ),
        lines(
            "Inter-token latency",
            "Time between two chunks of a stream (ITL where engines send one token a chunk).",
            Shown.SECONDS,
            *quantiles("kvgate_inter_token_seconds"),
        ),
        lines(
            "Waiting for an admission slot",
            "Wait in the gateways' queues; engines have queues of their own.",
            Shown.SECONDS,
            *quantiles("kvgate_queue_seconds"),
        ),
        lines(
            "Gateway time before sending, p95",
            "By stage: receive is the body's arrival; admission includes the wait.",
            Shown.SECONDS,
            query(quantile(0.95, "kvgate_stage_seconds", "stage"), "{{stage}}"),
        ),
        lines(
            "Gateway time before sending, mean",
            "Mean cost of a request; a few long prompts raise the mean.",
            Shown.SECONDS,
            query(mean("kvgate_stage_seconds", "stage"), "{{stage}}"),
        ),
    ),
)

_ROUTING: Final = Row(
    title="Routing",
    panels=(
        stacked(
            "Decisions by signal",
            "Deciding signal; prefix: the instance holds the prompt's beginning.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_routing_decisions_total", "policy, basis"), "{{policy}}: {{basis}}"),
        ),
        stacked(
            "Decisions by reason",
            "Reason for the chosen instance.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_routing_decisions_total", "reason"), "{{reason}}"),
        ),
        lines(
            "Prefill on another instance, by reason",
            "separated: prefill on another instance; other values: reason for prefill on the answering instance.",
            Shown.REQUESTS_PER_SECOND,
            quiet(_EQUAL, Proof.SEPARATED, rate("kvgate_separations_total", "reason"), "{{reason}}"),
            empty=_EQUAL,
        ),
        lines(
            "Wait for another instance's prefill, p95",
            "Wait of a separated request for its prefill instance.",
            Shown.SECONDS,
            quiet(_EQUAL, Proof.SEPARATED, quantile(0.95, "kvgate_separated_prefill_seconds"), "p95"),
            empty=_EQUAL,
        ),
        stacked(
            "Matched tokens by tier",
            "Prompt tokens that the chosen instance holds according to the residency index, by tier.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_matched_tier_tokens_total", "tier"), "{{tier}}"),
        ),
        lines(
            "Expected and found tokens",
            "matched: in the residency index. cached: reported by engines. overestimated: expected and not found.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_matched_tokens_total"), "matched"),
            query(rate("kvgate_cached_tokens_total"), "cached"),
            query(rate("kvgate_overestimated_tokens_total"), "overestimated"),
        ),
        lines(
            "TTFT, predicted and observed",
            "Means of the same streams, measured from sending the request.",
            Shown.SECONDS,
            query(mean("kvgate_ttft_predicted_seconds"), "predicted"),
            query(mean("kvgate_ttft_real_seconds"), "real"),
            empty=_STREAMS,
        ),
        lines(
            "Error of the TTFT prediction",
            "Mean error divided by mean TTFT. 0.2 is good; above 0.5 the policy works with wrong speeds.",
            Shown.SHARE,
            query(f"{rate('kvgate_ttft_error_seconds_sum')} / {rate('kvgate_ttft_real_seconds_sum')}", "error"),
            empty=_STREAMS,
        ),
    ),
)

_INSTANCES: Final = Row(
    title="Instances",
    panels=(
        lines(
            "State",
            "1 for the present state of each instance.",
            Shown.STATE,
            query("max by (instance, state) (kvgate_instance_state) == 1", "{{instance}} {{state}}"),
        ),
        lines(
            "Breakers",
            "open: no requests; half_open: one request at a time.",
            Shown.STATE,
            query("max by (instance, state) (kvgate_instance_breaker) == 1", "{{instance}} {{state}}"),
        ),
        lines(
            "Draining",
            "1 while an instance drains: no new requests.",
            Shown.STATE,
            query("max by (instance) (kvgate_instance_draining)", "{{instance}}"),
        ),
        lines(
            "In flight and limit",
            "The concurrency limit adapts to the instance's capacity.",
            Shown.REQUESTS,
            query("sum by (instance) (kvgate_requests_in_flight)", "{{instance}}"),
            query("sum by (instance) (kvgate_instance_request_limit)", "{{instance}} limit"),
        ),
        stacked(
            "Known KV blocks",
            "Blocks in the gateways' residency indexes, by tier.",
            Shown.BLOCKS,
            query("max by (instance, tier) (kvgate_resident_blocks)", "{{instance}} {{tier}}"),
        ),
        lines(
            "KV events applied",
            "Events about stored and removed blocks.",
            Shown.PER_SECOND,
            query(rate("kvgate_kv_events_total", "instance"), "{{instance}}"),
        ),
        lines(
            "Undecodable KV events",
            "After each the gateway fetches a new snapshot. More than a few: check that the versions match.",
            Shown.PER_SECOND,
            query(rate("kvgate_kv_events_undecodable_total", "instance"), "{{instance}}"),
        ),
        lines(
            "Residency resyncs, by reason",
            "`replayed` is the cheap one: replayed events filled a gap.",
            Shown.PER_SECOND,
            quiet(
                _NONE_REPAIRED,
                Proof.ACCIDENTS,
                rate("kvgate_kv_resyncs_total", "instance, reason"),
                "{{instance}} {{reason}}",
            ),
            empty=_NONE_REPAIRED,
        ),
    ),
)

_PROCESS: Final = Row(
    title="Gateways",
    panels=(
        lines("Scraped", "1 if Prometheus reaches the target.", Shown.STATE, query("up", "{{job}} {{instance}}")),
        lines(
            "Event loop lag, p99",
            "Least wait of every request. Above 50 ms the process is overloaded.",
            Shown.SECONDS,
            query(quantile(0.99, "kvgate_event_loop_lag_seconds", "gateway"), "{{gateway}}"),
        ),
        lines(
            "Processor",
            "Share of one core; a gateway process can use one.",
            Shown.CORES,
            query('rate(process_cpu_seconds_total{job="kvgate-gateway"}[$__rate_interval])', "{{gateway}} {{worker}}"),
        ),
        lines(
            "Main memory",
            "Resident memory.",
            Shown.BYTES,
            query('process_resident_memory_bytes{job="kvgate-gateway"}', "{{gateway}} {{worker}}"),
        ),
        lines(
            "Tasks",
            "Tasks of the event loop; the number follows the number of requests.",
            Shown.COUNT,
            query("sum by (gateway) (kvgate_tasks)", "{{gateway}}"),
        ),
        lines(
            "Failed health checks without an ejection",
            "The gateway's own event loop was late, or too few other instances were healthy.",
            Shown.PER_SECOND,
            query(rate("kvgate_health_checks_excused_total", "cause"), "{{cause}}"),
        ),
        lines(
            "Failures of background loops",
            "The gateway restarts a failed loop; the log has the reason.",
            Shown.PER_SECOND,
            quiet(_NONE_FAILED, Proof.ACCIDENTS, rate("kvgate_background_failures_total", "loop"), "{{loop}}"),
            empty=_NONE_FAILED,
        ),
        lines(
            "Problems",
            "Present problems of gateways, by kind; `GET /admin/v1/status` lists their messages.",
            Shown.COUNT,
            query("sum by (kind) (kvgate_problems)", "{{kind}}"),
        ),
        lines(
            "Spans",
            "Ended spans: exported, refused by the collector, or dropped because the queue was full. Requests do not wait for exports.",
            Shown.PER_SECOND,
            query(rate("kvgate_trace_spans_total", "outcome"), "{{outcome}}"),
            empty="traces are off",
        ),
        lines(
            "Versions",
            "Gateways by version.",
            Shown.COUNT,
            query("count by (version) (kvgate_build_info)", "{{version}}"),
        ),
        lines(
            "Workers",
            "1 for each process of a gateway with several workers.",
            Shown.STATE,
            quiet(
                "a gateway of one process has no workers", Proof.WORKERS, "kvgate_worker_up", "{{gateway}} {{worker}}"
            ),
            empty="gateways of one process",
        ),
    ),
)

BOARD: Final = Board(
    uid="kvgate-fleet",
    title="kvgate: fleet",
    about="Traffic, latency, routing and the state of every instance.",
    rows=(_TRAFFIC, _LATENCY, _ROUTING, _INSTANCES, _PROCESS),
)
