"""What a gateway exposes: every series, once."""

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
REQUESTS = _counter("requests", Unit.REQUESTS, "Inference requests by how they ended.", "operation", "outcome")
MODEL_REQUESTS = _counter(
    "model_requests",
    Unit.REQUESTS,
    "The same by model; requests for models that nobody serves are `other`.",
    "model",
    "outcome",
)
DURATION = _histogram("request_seconds", "From a request's arrival to the end of its answer.", "operation")
FIRST_BYTE = _histogram(
    "first_byte_seconds",
    "From a request's arrival to the first byte of the engine's answer; for streams, the first token.",
    "operation",
)
TIME_PER_TOKEN = _histogram(
    "time_per_output_token_seconds",
    "Mean time between the tokens of one streamed answer: from the first byte to its end, by the tokens after the "
    "first.",
    "operation",
    buckets=_TOKEN_SECONDS,
    appears="with the first stream whose engine told its usage",
)
BETWEEN_TOKENS = _histogram(
    "inter_token_seconds",
    "Each pause between two pieces of a streamed answer, as they arrive from the engine; of one that sends its tokens "
    "one by one, between two tokens.",
    buckets=_TOKEN_SECONDS,
)
STAGE = _histogram(
    "stage_seconds",
    "What a request spends in the gateway before it is sent. receive: authentication and reading the body; parse: "
    "reading its JSON; fingerprint: template, tokens, hashes; admission: quota and waiting for a turn; plan: choosing "
    "the instance.",
    "stage",
    buckets=_STAGE_SECONDS,
)
QUEUE_WAIT = _histogram("queue_seconds", "How long requests that were let in had waited for their turn.")
WAITING = _gauge("requests_waiting", Unit.REQUESTS, "Requests that wait for their turn.")
SHED = _counter("shed_requests", Unit.REQUESTS, "Requests refused before they were sent anywhere.", "reason")
RETRIES = _counter("retries", Unit.REQUESTS, "Requests tried again on another instance.", "cause")

# Tokens.
PROMPT_TOKENS = _counter("prompt_tokens", Unit.TOKENS, "Prompt tokens as engines counted them.")
COMPLETION_TOKENS = _counter("completion_tokens", Unit.TOKENS, "Generated tokens as engines counted them.")
CACHED_TOKENS = _counter(
    "cached_tokens", Unit.TOKENS, "Prompt tokens that engines report to have taken from their cache."
)
MATCHED_TOKENS = _counter("matched_tokens", Unit.TOKENS, "Prompt tokens that the chosen instance was known to hold.")
MATCHED_TIER_TOKENS = _counter(
    "matched_tier_tokens", Unit.TOKENS, "The same by the tier that holds them.", "tier", appears="with the first match"
)
OVERESTIMATED_TOKENS = _counter(
    "overestimated_tokens",
    Unit.TOKENS,
    "Prompt tokens that were expected in the chosen instance's cache and not found there.",
)

# Routing.
ROUTING = _counter(
    "routing_decisions",
    Unit.REQUESTS,
    "Routing decisions by policy, what decided, and why.",
    "policy",
    "basis",
    "reason",
)
SEPARATIONS = _counter(
    "separations",
    Unit.REQUESTS,
    "Requests by whether their prompt was computed by another instance (separated), or why not.",
    "reason",
    appears="where an instance computes prompts for others",
)
SEPARATED_PREFILL = _histogram(
    "separated_prefill_seconds",
    "What a separated request waited for its prompt at the other instance, successful or not.",
)
TTFT_PREDICTED = _histogram(
    "ttft_predicted_seconds", "Predicted time from sending a stream's request to its first token."
)
TTFT_REAL = _histogram("ttft_real_seconds", "What it was, of the same requests.")
TTFT_ERROR = _histogram("ttft_error_seconds", "How far the prediction was off, either way.")

# Tenants.
TENANT_REQUESTS = _counter(
    "tenant_requests",
    Unit.REQUESTS,
    "Inference requests of a tenant by how they ended. The series end when the tenant is deleted.",
    "tenant",
    "outcome",
)
TENANT_TOKENS = _counter(
    "tenant_tokens",
    Unit.TOKENS,
    "Tokens of a tenant as engines counted them: prompt, completion, and cached of the prompt's. The series end when "
    "the tenant is deleted.",
    "tenant",
    "kind",
)
TENANT_QUOTA = _gauge(
    "tenant_quota", Unit.COUNT, "What a tenant may use.", "tenant", "quota", appears="for tenants that have a quota"
)
TENANT_INFO = _gauge(
    "tenant_info",
    Unit.STATE,
    "1: joins a tenant's name with the one that engines account its KV blocks to.",
    "tenant",
    "kv_tenant",
)

# Instances.
INSTANCE_STATE = _gauge("instance_state", Unit.STATE, "1 for the state an instance is in.", "instance", "state")
INSTANCE_DRAINING = _gauge("instance_draining", Unit.STATE, "1 for an instance that is given nothing new.", "instance")
INSTANCE_BREAKER = _gauge(
    "instance_breaker", Unit.STATE, "1 for the state an instance's breaker is in.", "instance", "state"
)
IN_FLIGHT = _gauge("requests_in_flight", Unit.REQUESTS, "Requests of this gateway at an instance.", "instance")
INSTANCE_LIMIT = _gauge(
    "instance_request_limit", Unit.REQUESTS, "Requests that an instance is given at once.", "instance"
)
RESIDENT_BLOCKS = _gauge(
    "resident_blocks",
    Unit.BLOCKS,
    "KV blocks that an instance is known to hold.",
    "instance",
    "tier",
    appears="with the first block",
)
KV_EVENTS = _counter("kv_events", Unit.COUNT, "KV events taken in.", "instance")
KV_EVENTS_UNDECODABLE = _counter(
    "kv_events_undecodable",
    Unit.COUNT,
    "KV events, batches and snapshots that could not be read: each makes a new snapshot necessary.",
    "instance",
)
KV_RESYNCS = _counter(
    "kv_resyncs",
    Unit.COUNT,
    "Times an instance's residency was repaired, by what made it necessary.",
    "instance",
    "reason",
    appears="with the first",
)

# The process.
LOOP_LAG = _histogram(
    "event_loop_lag_seconds",
    "How much later than asked for the gateway's event loop woke a task: what every request waits at least.",
    buckets=LAG_SECONDS,
)
TASKS = _gauge("tasks", Unit.COUNT, "Tasks on this process's event loop.")
HEALTH_CHECKS_EXCUSED = _counter(
    "health_checks_excused",
    Unit.COUNT,
    "Failed health checks that took no instance out: `own_lag`, the gateway was late itself; `too_few`, the instance "
    "only timed out, and too few others are well.",
    "cause",
)
BACKGROUND_FAILURES = _counter(
    "background_failures",
    Unit.COUNT,
    "Failures of background loops; they start again.",
    "loop",
    appears="with the first failure",
)
PROBLEMS = _gauge(
    "problems",
    Unit.COUNT,
    "Problems that this process has now, by kind; `GET /admin/v1/status` has their messages.",
    "kind",
)
TRACE_SPANS = _counter(
    "trace_spans",
    Unit.COUNT,
    "Spans that ended: exported, failed (the collector didn't take them), or dropped as too many waited for it.",
    "outcome",
    appears="with tracing",
)
BUILD_INFO = _gauge("build_info", Unit.STATE, "1: the version that runs.", "version")
WORKER_UP = _gauge(
    "worker_up", Unit.STATE, "1 for a worker that answered this scrape.", "worker", appears="with several workers"
)

GATEWAY: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Series))
"""All of them, as they stand above."""
