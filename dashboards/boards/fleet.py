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
_NONE_TRIED: Final = "no request had to be tried again"
_NONE_REPAIRED: Final = "no residency had to be repaired"
_NONE_FAILED: Final = "no loop has failed"
_EQUAL: Final = "no instance prefills for others"
_STREAMS: Final = "no stream under a policy that counts in seconds"

_TRAFFIC: Final = Row(
    title="Traffic",
    panels=(
        number(
            "Requests",
            "Inference requests that ended, a second.",
            Shown.REQUESTS_PER_SECOND,
            rate("kvgate_requests_total"),
        ),
        number(
            "Usable instances",
            "Instances that are healthy, as at least one gateway sees them.",
            Shown.COUNT,
            'sum(max by (instance) (kvgate_instance_state{state="healthy"}))',
        ),
        number(
            "First byte, p95",
            "From arrival to the engine's first byte.",
            Shown.SECONDS,
            quantile(0.95, "kvgate_first_byte_seconds"),
        ),
        number(
            "Prompt tokens from cache",
            "Share of the prompt tokens that engines took from their caches, as they report it.",
            Shown.SHARE,
            f"{rate('kvgate_cached_tokens_total')} / {rate('kvgate_prompt_tokens_total')}",
        ),
        number("In flight", "Requests at instances now.", Shown.REQUESTS, "sum(kvgate_requests_in_flight)"),
        number(
            "Waiting", "Requests that wait for a turn in the gateways.", Shown.REQUESTS, "sum(kvgate_requests_waiting)"
        ),
        stacked(
            "Requests by outcome",
            "client_error is the client's 4xx, refused a 503 without an instance, shed a 429 by quota or saturation, "
            "upstream_error an engine's failure, deadline a request whose time was over.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_requests_total", "outcome"), "{{outcome}}"),
        ),
        stacked(
            "Requests by operation",
            "Which API clients use.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_requests_total", "operation"), "{{operation}}"),
        ),
        stacked(
            "Requests by model",
            "`other` is asked for and served by nobody.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_model_requests_total", "model"), "{{model}}"),
        ),
        stacked(
            "Tokens",
            "As engines count them.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_prompt_tokens_total"), "prompt"),
            query(rate("kvgate_completion_tokens_total"), "completion"),
        ),
        lines(
            "Refused before sending, by reason",
            "Quota used up, queue full, waited too long, or no instance.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_shed_requests_total", "reason"), "{{reason}}"),
            empty=_NONE_SHED,
        ),
        lines(
            "Tried again elsewhere, by cause",
            "Before their client had a byte.",
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
            "To the first byte",
            "For streams, the first token (TTFT). Exemplars link to traces.",
            Shown.SECONDS,
            *quantiles("kvgate_first_byte_seconds"),
        ),
        lines("To the end", "The whole answer.", Shown.SECONDS, *quantiles("kvgate_request_seconds")),
        lines(
            "Per output token",
            "Mean time between the tokens of a stream (TPOT).",
            Shown.SECONDS,
            *quantiles("kvgate_time_per_output_token_seconds"),
        ),
        lines(
            "Between pieces",
            "Each pause between two pieces of a stream (ITL where engines send tokens one by one): what a reader sees.",
            Shown.SECONDS,
            *quantiles("kvgate_inter_token_seconds"),
        ),
        lines(
            "Waiting for a turn",
            "In the gateways' queues; engines have queues of their own.",
            Shown.SECONDS,
            *quantiles("kvgate_queue_seconds"),
        ),
        lines(
            "What the gateway spends before sending, p95",
            "By step: receive is the body's arrival, admission includes waiting.",
            Shown.SECONDS,
            query(quantile(0.95, "kvgate_stage_seconds", "stage"), "{{stage}}"),
        ),
        lines(
            "The same, mean",
            "The mean tells what a request costs; a few long prompts raise it.",
            Shown.SECONDS,
            query(mean("kvgate_stage_seconds", "stage"), "{{stage}}"),
        ),
    ),
)

_ROUTING: Final = Row(
    title="Routing",
    panels=(
        stacked(
            "Decisions by what decided",
            "prefix: the instance holds the prompt's beginning.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_routing_decisions_total", "policy, basis"), "{{policy}}: {{basis}}"),
        ),
        stacked(
            "Decisions by reason",
            "Why that one and no other.",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_routing_decisions_total", "reason"), "{{reason}}"),
        ),
        lines(
            "Prompts computed by another instance, or why not",
            "separated: yes; the others say why a prompt was computed where it is answered.",
            Shown.REQUESTS_PER_SECOND,
            quiet(_EQUAL, Proof.SEPARATED, rate("kvgate_separations_total", "reason"), "{{reason}}"),
            empty=_EQUAL,
        ),
        lines(
            "Waited for another instance's prefill, p95",
            "What a separated request waits before its answering instance is asked.",
            Shown.SECONDS,
            quiet(_EQUAL, Proof.SEPARATED, quantile(0.95, "kvgate_separated_prefill_seconds"), "p95"),
            empty=_EQUAL,
        ),
        stacked(
            "Matched tokens by tier",
            "What the chosen instance was known to hold, and where.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_matched_tier_tokens_total", "tier"), "{{tier}}"),
        ),
        lines(
            "Expected and found",
            "matched: known to be there. cached: reported by engines. overestimated: expected and not found.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_matched_tokens_total"), "matched"),
            query(rate("kvgate_cached_tokens_total"), "cached"),
            query(rate("kvgate_overestimated_tokens_total"), "overestimated"),
        ),
        lines(
            "Time to the first token, predicted and real",
            "Means of the same streams, from sending on.",
            Shown.SECONDS,
            query(mean("kvgate_ttft_predicted_seconds"), "predicted"),
            query(mean("kvgate_ttft_real_seconds"), "real"),
            empty=_STREAMS,
        ),
        lines(
            "How wrong the prediction is",
            "Mean error by the mean time: 0.2 is good, above 0.5 the policy works with wrong speeds.",
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
            "1 for the state each instance is in.",
            Shown.STATE,
            query("max by (instance, state) (kvgate_instance_state) == 1", "{{instance}} {{state}}"),
        ),
        lines(
            "Breakers",
            "open: given nothing; half_open: one request at a time.",
            Shown.STATE,
            query("max by (instance, state) (kvgate_instance_breaker) == 1", "{{instance}} {{state}}"),
        ),
        lines(
            "Draining",
            "Given nothing new.",
            Shown.STATE,
            query("max by (instance) (kvgate_instance_draining)", "{{instance}}"),
        ),
        lines(
            "In flight and limit",
            "The limit adapts to what an instance can take.",
            Shown.REQUESTS,
            query("sum by (instance) (kvgate_requests_in_flight)", "{{instance}}"),
            query("sum by (instance) (kvgate_instance_request_limit)", "{{instance}} limit"),
        ),
        stacked(
            "Known KV blocks",
            "What gateways know to be cached, by tier.",
            Shown.BLOCKS,
            query("max by (instance, tier) (kvgate_resident_blocks)", "{{instance}} {{tier}}"),
        ),
        lines(
            "KV events taken in",
            "Blocks stored and removed that instances announced.",
            Shown.PER_SECOND,
            query(rate("kvgate_kv_events_total", "instance"), "{{instance}}"),
        ),
        lines(
            "KV events that can't be read",
            "Each makes the gateway learn the instance anew; more than a few say that versions don't fit.",
            Shown.PER_SECOND,
            query(rate("kvgate_kv_events_undecodable_total", "instance"), "{{instance}}"),
        ),
        lines(
            "Residency repaired, by reason",
            "`replayed` is the cheap one: a gap was filled.",
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
        lines("Scraped", "1 where Prometheus reaches a target.", Shown.STATE, query("up", "{{job}} {{instance}}")),
        lines(
            "Event loop lag, p99",
            "What every request waits at least; above 50 ms the process has too much to do.",
            Shown.SECONDS,
            query(quantile(0.99, "kvgate_event_loop_lag_seconds", "gateway"), "{{gateway}}"),
        ),
        lines(
            "Processor",
            "Of one core: a gateway process can use one.",
            Shown.CORES,
            query('rate(process_cpu_seconds_total{job="kvgate-gateway"}[$__rate_interval])', "{{gateway}} {{worker}}"),
        ),
        lines(
            "Main memory",
            "Resident.",
            Shown.BYTES,
            query('process_resident_memory_bytes{job="kvgate-gateway"}', "{{gateway}} {{worker}}"),
        ),
        lines(
            "Tasks",
            "They follow the requests, and return with them.",
            Shown.COUNT,
            query("sum by (gateway) (kvgate_tasks)", "{{gateway}}"),
        ),
        lines(
            "Failed health checks that took nobody out",
            "The gateway was late itself, or too few others are well.",
            Shown.PER_SECOND,
            query(rate("kvgate_health_checks_excused_total", "cause"), "{{cause}}"),
        ),
        lines(
            "Background loops that failed",
            "They start again; the log has the reason.",
            Shown.PER_SECOND,
            quiet(_NONE_FAILED, Proof.ACCIDENTS, rate("kvgate_background_failures_total", "loop"), "{{loop}}"),
            empty=_NONE_FAILED,
        ),
        lines(
            "Problems",
            "Problems that gateways have now, by kind; `GET /admin/v1/status` has their messages.",
            Shown.COUNT,
            query("sum by (kind) (kvgate_problems)", "{{kind}}"),
        ),
        lines(
            "Spans",
            "Of traces: sent, not taken by the collector, or dropped as too many waited for it. Requests don't wait.",
            Shown.PER_SECOND,
            query(rate("kvgate_trace_spans_total", "outcome"), "{{outcome}}"),
            empty="traces are off",
        ),
        lines(
            "Versions",
            "How many gateways run which version.",
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
