"""What a gateway exposes: every metric family, once."""

from typing import Final

from kvcontrol.series.series import Kind, Series, Unit

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
_STAGE_SECONDS: Final = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30),
)
LAG_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


def _counter(name: str, unit: Unit, text: str, *labels: str, appears: str = "") -> Series:
    return Series(name=f"kvgate_{name}", kind=Kind.COUNTER, unit=unit, help=text, labels=labels, appears=appears)


def _gauge(name: str, unit: Unit, text: str, *labels: str, appears: str = "") -> Series:
    return Series(name=f"kvgate_{name}", kind=Kind.GAUGE, unit=unit, help=text, labels=labels, appears=appears)


def _histogram(name: str, text: str, *labels: str, buckets: tuple[float, ...] = SECONDS, appears: str = "") -> Series:
    return Series(
        name=f"kvgate_{name}",
        kind=Kind.HISTOGRAM,
        unit=Unit.SECONDS,
        help=text,
        labels=labels,
        buckets=buckets,
        appears=appears,
    )


# Requests.
REQUESTS = _counter("requests", Unit.REQUESTS, "Inference requests by outcome.", "operation", "outcome")
MODEL_REQUESTS = _counter(
    "model_requests",
    Unit.REQUESTS,
    "Inference requests by model and outcome; requests for models that no instance serves count as `other`.",
    "model",
    "outcome",
)
DURATION = _histogram("request_seconds", "Time from a request's arrival to the end of its answer.", "operation")
FIRST_BYTE = _histogram(
    "first_byte_seconds",
    "Time from a request's arrival to the first byte of the engine's answer; for streams, time to first token (TTFT).",
    "operation",
)
TIME_PER_TOKEN = _histogram(
    "time_per_output_token_seconds",
    "Time per output token (TPOT) of a streamed answer: time from its first byte to its end, divided by its tokens "
    "after the first.",
    "operation",
    buckets=_TOKEN_SECONDS,
    appears="with the first stream whose engine reported its usage",
)
BETWEEN_TOKENS = _histogram(
    "inter_token_seconds",
    "Inter-token latency (ITL): time between two chunks of a streamed answer as they arrive from the engine. An engine "
    "that sends one token a chunk makes it the time between two tokens.",
    buckets=_TOKEN_SECONDS,
)
STAGE = _histogram(
    "stage_seconds",
    "Time of a request in the gateway by stage, before the gateway sends the request. receive: authentication and "
    "reading the body; parse: JSON; fingerprint: chat template, tokens, hashes; admission: quota and waiting for an "
    "admission slot; plan: choice of the instance.",
    "stage",
    buckets=_STAGE_SECONDS,
)
QUEUE_WAIT = _histogram("queue_seconds", "Time that admitted requests waited for an admission slot.")
WAITING = _gauge("requests_waiting", Unit.REQUESTS, "Requests waiting for an admission slot.")
SHED = _counter(
    "shed_requests", Unit.REQUESTS, "Requests refused before the gateway sent them to an instance.", "reason"
)
RETRIES = _counter("retries", Unit.REQUESTS, "Requests retried on another instance (failover).", "cause")

# Tokens.
PROMPT_TOKENS = _counter("prompt_tokens", Unit.TOKENS, "Prompt tokens, counted by the engines.")
COMPLETION_TOKENS = _counter("completion_tokens", Unit.TOKENS, "Generated tokens, counted by the engines.")
CACHED_TOKENS = _counter("cached_tokens", Unit.TOKENS, "Prompt tokens that engines report as cached.")
MATCHED_TOKENS = _counter(
    "matched_tokens", Unit.TOKENS, "Prompt tokens that the residency index attributed to the chosen instance."
)
MATCHED_TIER_TOKENS = _counter(
    "matched_tier_tokens",
    Unit.TOKENS,
    "Matched prompt tokens by the tier that holds them.",
    "tier",
    appears="with the first match",
)
OVERESTIMATED_TOKENS = _counter(
    "overestimated_tokens",
    Unit.TOKENS,
    "Prompt tokens that the gateway expected in the chosen instance's cache and that the engine did not find there.",
)

# Routing.
ROUTING = _counter(
    "routing_decisions",
    Unit.REQUESTS,
    "Routing decisions by policy, deciding signal and reason.",
    "policy",
    "basis",
    "reason",
)
SEPARATIONS = _counter(
    "separations",
    Unit.REQUESTS,
    "Requests whose prompt another instance computed (`separated`), and the others by the reason against it.",
    "reason",
    appears="where an instance computes prompts for others",
)
SEPARATED_PREFILL = _histogram(
    "separated_prefill_seconds",
    "Time that a separated request waited for the prefill instance, successful or not.",
)
TTFT_PREDICTED = _histogram(
    "ttft_predicted_seconds",
    "Predicted TTFT of streams: time from sending the request to the instance to its first token.",
)
TTFT_REAL = _histogram("ttft_real_seconds", "Observed TTFT of the requests whose TTFT was predicted.")
TTFT_ERROR = _histogram("ttft_error_seconds", "Absolute difference between predicted and observed TTFT.")

# Tenants.
TENANT_REQUESTS = _counter(
    "tenant_requests",
    Unit.REQUESTS,
    "Inference requests of a tenant by outcome. The time series end when the tenant is deleted.",
    "tenant",
    "outcome",
)
TENANT_TOKENS = _counter(
    "tenant_tokens",
    Unit.TOKENS,
    "Tokens of a tenant, counted by the engines: prompt, completion, and cached prompt tokens. The time series end "
    "when "
    "the tenant is deleted.",
    "tenant",
    "kind",
)
TENANT_QUOTA = _gauge(
    "tenant_quota", Unit.COUNT, "Quotas of a tenant.", "tenant", "quota", appears="for tenants that have a quota"
)
TENANT_INFO = _gauge(
    "tenant_info",
    Unit.STATE,
    "Always 1: joins a tenant's name with the digest under which engines account the tenant's KV blocks.",
    "tenant",
    "kv_tenant",
)

# Instances.
INSTANCE_STATE = _gauge(
    "instance_state", Unit.STATE, "1 for the present state of an instance, 0 for the others.", "instance", "state"
)
INSTANCE_DRAINING = _gauge(
    "instance_draining", Unit.STATE, "1 while an instance drains: the gateway sends it no new requests.", "instance"
)
INSTANCE_BREAKER = _gauge(
    "instance_breaker",
    Unit.STATE,
    "1 for the present state of an instance's circuit breaker, 0 for the others.",
    "instance",
    "state",
)
IN_FLIGHT = _gauge(
    "requests_in_flight", Unit.REQUESTS, "Requests of this gateway in flight at an instance.", "instance"
)
INSTANCE_LIMIT = _gauge(
    "instance_request_limit",
    Unit.REQUESTS,
    "Concurrency limit of an instance: requests of this gateway in flight at most.",
    "instance",
)
RESIDENT_BLOCKS = _gauge(
    "resident_blocks",
    Unit.BLOCKS,
    "KV blocks of an instance in the gateway's residency index.",
    "instance",
    "tier",
    appears="with the first block",
)
KV_EVENTS = _counter("kv_events", Unit.COUNT, "KV events applied to the residency index.", "instance")
KV_EVENTS_UNDECODABLE = _counter(
    "kv_events_undecodable",
    Unit.COUNT,
    "KV events, batches and snapshots that could not be decoded; after each the gateway fetches a new snapshot.",
    "instance",
)
KV_RESYNCS = _counter(
    "kv_resyncs",
    Unit.COUNT,
    "Resynchronizations of an instance's residency, by reason.",
    "instance",
    "reason",
    appears="with the first",
)

# The process.
LOOP_LAG = _histogram(
    "event_loop_lag_seconds",
    "Event-loop lag: delay between the due time of a task and its start. Every request waits at least this long.",
    buckets=LAG_SECONDS,
)
TASKS = _gauge("tasks", Unit.COUNT, "Tasks on this process's event loop.")
HEALTH_CHECKS_EXCUSED = _counter(
    "health_checks_excused",
    Unit.COUNT,
    "Failed health checks that ejected no instance: `own_lag`, the gateway's own event loop was late; `too_few`, the "
    "check timed out while too few other instances were healthy.",
    "cause",
)
BACKGROUND_FAILURES = _counter(
    "background_failures",
    Unit.COUNT,
    "Failures of background loops; the gateway restarts a failed loop.",
    "loop",
    appears="with the first failure",
)
PROBLEMS = _gauge(
    "problems",
    Unit.COUNT,
    "Present problems of this process, by kind; `GET /admin/v1/status` lists their messages.",
    "kind",
)
TRACE_SPANS = _counter(
    "trace_spans",
    Unit.COUNT,
    "Ended spans: exported, failed (the collector refused them), or dropped (the export queue was full).",
    "outcome",
    appears="with tracing",
)
BUILD_INFO = _gauge("build_info", Unit.STATE, "Always 1, with the running version as a label.", "version")
WORKER_UP = _gauge(
    "worker_up",
    Unit.STATE,
    "1 for each worker process that answered this scrape.",
    "worker",
    appears="with several workers",
)

GATEWAY: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Series))
"""All of them, as they stand above."""
