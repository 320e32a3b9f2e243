"""One engine instance: LMDeploy's metrics of its requests, kvgate's metrics of its cache and its events."""

from typing import Final

from dashboards.panel import (
    Board,
    Proof,
    Query,
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

_ONE: Final = 'instance="$instance"'

_REQUESTS: Final = Row(
    title="Requests",
    panels=(
        number(
            "Engine process",
            "On while the engine process answers its api_server.",
            Shown.STATE,
            f"kvgate_engine_up{{{_ONE}}}",
        ),
        number("Running", "Requests in the batch.", Shown.REQUESTS, f"lmdeploy:num_requests_running{{{_ONE}}}"),
        number(
            "Waiting", "Requests waiting in the engine.", Shown.REQUESTS, f"lmdeploy:num_requests_waiting{{{_ONE}}}"
        ),
        number("KV pool in use", "LMDeploy's own pool (HBM).", Shown.SHARE, f"lmdeploy:gpu_cache_usage_perc{{{_ONE}}}"),
        number(
            "Prefix hits",
            "Share of looked-up prompt tokens found in HBM.",
            Shown.SHARE,
            f"{rate('kvgate_engine_prefix_hit_tokens_total', where=_ONE)} / {rate('kvgate_engine_prefix_query_tokens_total', where=_ONE)}",
        ),
        number(
            "Memory",
            "Main memory of the api_server's process.",
            Shown.BYTES,
            f"process_resident_memory_bytes{{{_ONE}}}",
        ),
        lines(
            "Time to first token",
            "Measured in the api_server, without the gateway's share.",
            Shown.SECONDS,
            *quantiles("lmdeploy:time_to_first_token_seconds", _ONE),
        ),
        lines(
            "Inter-token latency",
            "Time between two tokens of one answer (ITL). Prefills of other requests lengthen it.",
            Shown.SECONDS,
            *quantiles("lmdeploy:iter_token_latency", _ONE),
        ),
        lines(
            "Time per output token",
            "Mean of each request (TPOT).",
            Shown.SECONDS,
            *quantiles("lmdeploy:time_per_output_token_seconds", _ONE),
        ),
        lines(
            "In the engine's queue",
            "Wait before the first step.",
            Shown.SECONDS,
            *quantiles("lmdeploy:request_queue_time_seconds", _ONE),
        ),
        lines(
            "Prefill and decode",
            "Mean time of a request in each phase.",
            Shown.SECONDS,
            query(mean("lmdeploy:request_prefill_time_seconds", where=_ONE), "prefill"),
            query(mean("lmdeploy:request_decode_time_seconds", where=_ONE), "decode"),
        ),
        stacked(
            "Tokens",
            "Prompt tokens (computed or found) and generated tokens.",
            Shown.TOKENS_PER_SECOND,
            query(rate("lmdeploy:prompt_tokens_total", where=_ONE), "prompt"),
            query(rate("lmdeploy:generation_tokens_total", where=_ONE), "generated"),
        ),
    ),
)

_QUEUE: Final = Row(
    title="The engine's waiting queue",
    panels=(
        stacked(
            "Waiting, by priority",
            "Requests that have not started, by the strategy's count.",
            Shown.REQUESTS,
            query(f"kvgate_engine_waiting_requests{{{_ONE}}}", "{{priority}}"),
        ),
        lines(
            "Queue wait before start, p95",
            "By priority; a higher priority should wait less.",
            Shown.SECONDS,
            query(quantile(0.95, "kvgate_engine_queue_wait_seconds", "priority", _ONE), "{{priority}}"),
        ),
        lines(
            "Longest wait",
            "Present wait of the request that has waited longest.",
            Shown.SECONDS,
            query(f"kvgate_engine_queue_oldest_seconds{{{_ONE}}}", "oldest"),
        ),
        lines(
            "Strategy in charge",
            "Strategy that orders the queue; lmdeploy: kvgate's strategy failed, see the log.",
            Shown.STATE,
            query(f"kvgate_engine_schedule_in_charge{{{_ONE}}}", "{{strategy}}"),
        ),
        lines(
            "Left, returned, promoted",
            "Left before the start (the client disconnected), returned (preempted or loaded), promoted (started because of their age).",
            Shown.REQUESTS_PER_SECOND,
            query(rate("kvgate_engine_queue_left_total", "priority", _ONE), "left {{priority}}"),
            query(rate("kvgate_engine_queue_returned_total", where=_ONE), "returned"),
            query(rate("kvgate_engine_queue_promotions_total", where=_ONE), "promoted"),
        ),
        lines(
            "Failures of the queue",
            "Anything above 0 is a defect of kvgate.",
            Shown.PER_SECOND,
            query(rate("kvgate_engine_queue_errors_total", where=_ONE), "strategy"),
            query(rate("kvgate_engine_queue_repairs_total", where=_ONE), "built anew"),
        ),
    ),
)

_NO_HANDOVER: Final = "no handover of prompts"


def _handed(expr: str, legend: str) -> Query:
    return quiet(_NO_HANDOVER, Proof.SEPARATED, expr, legend)


_HANDOVER: Final = Row(
    title="Handover of prompts",
    panels=(
        lines(
            "Handed over and fetched",
            "Prefill instance: handed over, expired, released. Decode instance: fetched, recomputed.",
            Shown.REQUESTS_PER_SECOND,
            _handed(rate("kvgate_engine_handovers_total", "outcome", _ONE), "{{outcome}}"),
            empty=_NO_HANDOVER,
        ),
        lines(
            "Recomputed, by reason",
            "Prompts whose fetch failed: the answer is correct and slower.",
            Shown.REQUESTS_PER_SECOND,
            _handed(rate("kvgate_engine_handovers_recomputed_total", "reason", _ONE), "{{reason}}"),
            empty=_NO_HANDOVER,
        ),
        lines(
            "KV from other instances",
            "Bytes received.",
            Shown.BYTES_PER_SECOND,
            _handed(rate("kvgate_engine_handover_bytes_total", where=_ONE), "fetched"),
            empty=_NO_HANDOVER,
        ),
        lines(
            "Requests waiting for KV from other instances",
            "Mean number at a time.",
            Shown.REQUESTS,
            _handed(rate("kvgate_engine_handover_seconds_total", where=_ONE), "waiting"),
            empty=_NO_HANDOVER,
        ),
        lines(
            "Prompts held for other instances",
            "Computed prompts that wait to be fetched, and their blocks.",
            Shown.BLOCKS,
            _handed(f"kvgate_engine_held_prompts{{{_ONE}}}", "prompts"),
            _handed(f"kvgate_engine_held_blocks{{{_ONE}}}", "blocks"),
            empty=_NO_HANDOVER,
        ),
    ),
)

_CACHE: Final = Row(
    title="Cache",
    panels=(
        lines(
            "Prompt tokens looked up and found in HBM",
            "The prefix cache of the engine's own pool.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_engine_prefix_query_tokens_total", where=_ONE), "looked up"),
            query(rate("kvgate_engine_prefix_hit_tokens_total", where=_ONE), "found"),
        ),
        stacked(
            "Reusable KV blocks",
            "Blocks that later requests can reuse, by tier.",
            Shown.BLOCKS,
            query(f"kvgate_engine_resident_blocks{{{_ONE}}}", "{{tier}}"),
        ),
        lines(
            "Prefill speed",
            "Prompt tokens per second; measured only with tiers.",
            Shown.TOKENS_PER_SECOND,
            query(f"kvgate_engine_prefill_tokens_per_second{{{_ONE}}}", "prefill"),
            empty="no tiers below HBM",
        ),
    ),
)

_EVENTS: Final = Row(
    title="KV events",
    panels=(
        lines(
            "Events",
            "Blocks published as stored, removed or cleared.",
            Shown.BLOCKS_PER_SECOND,
            query(rate("kvgate_engine_kv_events_total", "kind", _ONE), "{{kind}}"),
        ),
        lines(
            "Batches",
            "Sequence number of the last batch. A fall to -1 is a restart.",
            Shown.COUNT,
            query(f"kvgate_engine_kv_events_seq{{{_ONE}}}", "last batch"),
        ),
        lines(
            "Lost events and snapshots",
            "Events dropped because the queue was full; a full snapshot follows.",
            Shown.PER_SECOND,
            query(rate("kvgate_engine_kv_events_dropped_total", where=_ONE), "lost"),
            query(rate("kvgate_engine_kv_events_resyncs_total", where=_ONE), "snapshots"),
        ),
        lines(
            "Failures of kvgate",
            "Any value above 0 is a defect of kvgate. The engine runs on; its log has the traceback.",
            Shown.PER_SECOND,
            query(rate("kvgate_engine_hook_errors_total", where=_ONE), "block trie"),
            query(rate("kvgate_engine_eviction_errors_total", where=_ONE), "eviction"),
            query(rate("kvgate_engine_publisher_errors_total", where=_ONE), "publisher"),
            query(rate("kvgate_engine_offload_guard_errors_total", where=_ONE), "connector"),
            query(rate("kvgate_engine_offload_worker_faults_total", where=_ONE), "transfers"),
            query(f"max(kvgate_engine_offload_failed_saves_in_a_row{{{_ONE}}})", "saves failed in a row"),
            width=16,
        ),
        lines(
            "Event loop lag, p99",
            "Event-loop lag: that of the api_server delays every stream, that of the engine every step.",
            Shown.SECONDS,
            query(
                f"histogram_quantile(0.99, sum by (le, process) "
                f"(rate(kvgate_engine_event_loop_lag_seconds_bucket{{{_ONE}}}[$__rate_interval])))",
                "{{process}}",
            ),
        ),
        lines(
            "Spans",
            "Ended spans: exported, refused by the collector, or dropped because the queue was full.",
            Shown.PER_SECOND,
            query(rate("kvgate_engine_trace_spans_total", "outcome", where=_ONE), "{{outcome}}"),
            empty="traces are off",
        ),
        lines(
            "Processor",
            "CPU time of the api_server process, without the engine process.",
            Shown.CORES,
            query(f"rate(process_cpu_seconds_total{{{_ONE}}}[$__rate_interval])", "api_server"),
        ),
    ),
)

_STEPS: Final = Row(
    title="Steps",
    panels=(
        lines(
            "Time on the device",
            "Share of time in which the device computes prompts or tokens, or is idle: no request, requests waiting for "
            "KV, or the host launching the next step. The sum is below 1 while a step runs.",
            Shown.SHARE,
            query(rate("kvgate_engine_step_seconds_sum", "kind", where=_ONE), "{{kind}}"),
            query(rate("kvgate_engine_device_idle_seconds_sum", "reason", where=_ONE), "idle: {{reason}}"),
        ),
        lines(
            "Step time, p99",
            "Time of a step on the device. Running answers wait for prefill steps and chunks.",
            Shown.SECONDS,
            query(
                f"histogram_quantile(0.99, sum by (le, kind) "
                f"(rate(kvgate_engine_step_seconds_bucket{{{_ONE}}}[$__rate_interval])))",
                "{{kind}}",
            ),
        ),
        lines(
            "Host time between steps, p99",
            "Idle time of the device before a step that the host had not launched yet.",
            Shown.SECONDS,
            query(
                f"histogram_quantile(0.99, sum by (le) (rate("
                f'kvgate_engine_device_idle_seconds_bucket{{{_ONE},reason="host"}}[$__rate_interval])))',
                "host",
            ),
        ),
        lines(
            "Sequences in a step",
            "Mean number of sequences that a step computes.",
            Shown.COUNT,
            query(
                f"sum by (kind) (rate(kvgate_engine_step_sequences_sum{{{_ONE}}}[$__rate_interval])) / "
                f"sum by (kind) (rate(kvgate_engine_step_sequences_count{{{_ONE}}}[$__rate_interval]))",
                "{{kind}}",
            ),
        ),
        lines(
            "Tokens computed",
            "Prompt tokens of prefill steps and chunks, generated tokens of decode steps.",
            Shown.TOKENS_PER_SECOND,
            query(rate("kvgate_engine_step_tokens_total", "kind", where=_ONE), "{{kind}}"),
        ),
        lines(
            "Why a step was chosen",
            "Reasons of the pace: owed (decode steps due after prompts), chunk, prompt, no_prompt, nobody_answers, "
            "no_room. Shorter prompts that overtook a longer one between its chunks.",
            Shown.PER_SECOND,
            query(rate("kvgate_engine_paced_steps_total", "reason", where=_ONE), "{{reason}}"),
            query(rate("kvgate_engine_overtaking_prompts_total", "outcome", where=_ONE), "shorter prompt: {{outcome}}"),
            query(rate("kvgate_engine_pace_errors_total", where=_ONE), "failures of the pace"),
        ),
        lines(
            "Pace in charge",
            "Pace that chooses between prefill and decode steps; `lmdeploy` after an error of the pace.",
            Shown.STATE,
            query(f"kvgate_engine_pace_in_charge{{{_ONE}}}", "{{pace}}"),
        ),
        lines(
            "Chunk beside answers",
            "Largest chunk while answers run; the engine's own size without a target.",
            Shown.TOKENS,
            query(f"kvgate_engine_chunk_tokens{{{_ONE}}}", "chunk"),
        ),
        lines(
            "Inter-token latency target",
            "Target, and whether the engine keeps it; the engine's log has the reason if not.",
            Shown.SECONDS,
            query(f"kvgate_engine_itl_target_seconds{{{_ONE}}}", "target"),
            query(f"kvgate_engine_itl_target_unmet{{{_ONE}}}", "can't be kept: 1"),
        ),
        lines(
            "Answers and requests waiting for steps",
            "Mean number of running answers without a token from the step, and of queued requests.",
            Shown.COUNT,
            query(rate("kvgate_engine_stalled_answer_seconds_total", where=_ONE), "answers"),
            query(rate("kvgate_engine_waiting_request_seconds_total", where=_ONE), "requests"),
            query(rate("kvgate_engine_steps_lost_total", where=_ONE), "steps not measured a second"),
        ),
    ),
)

BOARD: Final = Board(
    uid="kvgate-instance",
    title="kvgate: one instance",
    about="An engine's requests, cache and events.",
    rows=(_REQUESTS, _STEPS, _QUEUE, _CACHE, _HANDOVER, _EVENTS),
    by_instance=True,
)
