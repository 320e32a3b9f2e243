"""What an engine instance exposes beside LMDeploy's own metrics: every metric family of kvgate, once."""

from typing import Final

from kvcontrol.core.policy_control import WAIT_BUCKETS_S
from kvcontrol.core.steps import IDLE_SECONDS
from kvcontrol.core.steps import STEP_SECONDS as STEP_BUCKETS_S
from kvcontrol.core.steps import STEP_SEQUENCES as STEP_SEQUENCE_BUCKETS
from kvcontrol.series.gateway import LAG_SECONDS
from kvcontrol.series.series import Kind, Series, Unit

_TIERS: Final = "with tiers below HBM"
_POLICIES: Final = "from the engine process's first reply on"
_HANDS_OVER: Final = "where prefill and decode instances hand prompts over"
_ADAPTIVE: Final = "while `adaptive` is the policy of HBM"
_SHADOWS: Final = "while shadow policies run"
_ANEW: Final = "restarts at 0 when the list of shadow policies changes"


def _counter(name: str, unit: Unit, text: str, *labels: str, appears: str = "") -> Series:
    return Series(name=f"kvgate_engine_{name}", kind=Kind.COUNTER, unit=unit, help=text, labels=labels, appears=appears)


def _gauge(name: str, unit: Unit, text: str, *labels: str, appears: str = "") -> Series:
    return Series(name=f"kvgate_engine_{name}", kind=Kind.GAUGE, unit=unit, help=text, labels=labels, appears=appears)


# The engine process and its events.
UP = _gauge("up", Unit.STATE, "1 when the engine process answers; at 0 all other metrics of kvgate are absent.")
RESIDENT_BLOCKS = _gauge(
    "resident_blocks", Unit.BLOCKS, "KV blocks that later requests can reuse.", "tier", appears="with the first block"
)
KV_EVENTS = _counter("kv_events", Unit.BLOCKS, "KV events recorded: stored, removed, cleared.", "kind")
KV_EVENTS_SEQ = _gauge(
    "kv_events_seq", Unit.COUNT, "Sequence number of the last published event batch, -1 before the first."
)
KV_EVENTS_DROPPED = _counter("kv_events_dropped", Unit.COUNT, "KV events dropped because the queue was full.")
KV_EVENTS_RESYNCS = _counter("kv_events_resyncs", Unit.COUNT, "Full snapshots published again.")
HOOK_ERRORS = _counter("hook_errors", Unit.COUNT, "Changes of the block trie that failed to become KV events.")
EVICTION_ERRORS = _counter(
    "eviction_errors", Unit.COUNT, "1 when the eviction policy failed and LMDeploy's own eviction replaced it."
)
PUBLISHER_ERRORS = _counter("publisher_errors", Unit.COUNT, "Failed rounds of the event publisher.")
LOOP_LAG = Series(
    name="kvgate_engine_event_loop_lag_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    help="Event-loop lag of the instance's processes: the api_server's and the engine's.",
    labels=("process",),
    buckets=LAG_SECONDS,
)
TRACE_SPANS = _counter(
    "trace_spans",
    Unit.COUNT,
    "Ended spans: exported, failed (the collector refused them), or dropped (the export queue was full).",
    "outcome",
    appears="with tracing",
)

# Tiers.
TIER_CAPACITY = _gauge("tier_capacity_blocks", Unit.BLOCKS, "KV blocks that a tier can hold.", "tier")
TIER_USED = _gauge("tier_used_blocks", Unit.BLOCKS, "KV blocks that occupy space in a tier.", "tier")
PINNED_BLOCKS = _gauge("pinned_blocks", Unit.BLOCKS, "KV blocks of pinned prefixes that a tier holds.", "tier")
TIER_BLOCK_BYTES = _gauge("tier_block_bytes", Unit.BYTES, "Size of a KV block in a tier.", "tier")
TIER_FRAGMENTATION = _gauge(
    "tier_fragmentation_ratio",
    Unit.RATIO,
    "Share of a tier's used bytes without reusable KV. In HBM: blocks that are partly filled or belong to one request "
    "alone. Below HBM: bytes lost to rounding to pages.",
    "tier",
    appears="once the tier holds a block",
)
TIER_HIT_TOKENS = _counter(
    "tier_hit_tokens",
    Unit.TOKENS,
    "Prompt tokens found in a tier; each token counts for the fastest tier that holds it.",
    "tier",
)
TIER_LOST = _counter(
    "tier_lost_blocks",
    Unit.BLOCKS,
    "KV blocks that left a tier, by reason.",
    "tier",
    "reason",
    appears=_TIERS,
)

# Tenants in the tiers below HBM.
TENANT_USED = _gauge(
    "tenant_used_bytes", Unit.BYTES, "Bytes of a tenant's KV in a tier.", "tier", "tenant", appears=_TIERS
)
TENANT_GUARANTEED = _gauge(
    "tenant_guaranteed_bytes",
    Unit.BYTES,
    "Guaranteed bytes of a tenant: other tenants' blocks never evict it below them.",
    "tier",
    "tenant",
    appears=_TIERS,
)
TENANT_BURST = _gauge(
    "tenant_burst_bytes",
    Unit.BYTES,
    "Burst limit of a tenant in bytes: the most that its blocks may occupy.",
    "tier",
    "tenant",
    appears=f"{_TIERS}, for tenants with a burst limit",
)
TENANT_VIOLATIONS = _counter(
    "tenant_over_burst_blocks",
    Unit.BLOCKS,
    "Quota violations: blocks evicted or refused because of a tenant's burst limit. A tenant without blocks may lose "
    "its "
    "count; tenant_hit_blocks explains `other`.",
    "tier",
    "tenant",
    appears=_TIERS,
)
TENANT_HITS = _counter(
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
OFFLOAD_LOADS = _counter(
    "offload_loads", Unit.REQUESTS, "Requests whose KV was restored from a tier below HBM.", appears=_TIERS
)
OFFLOAD_FAILED_LOADS = _counter(
    "offload_failed_loads",
    Unit.REQUESTS,
    "Requests whose restore failed; the engine computed their tokens.",
    appears=_TIERS,
)
OFFLOAD_DECLINED_LOADS = _counter(
    "offload_declined_loads",
    Unit.COUNT,
    "Look-ups whose restore was declined because computing is expected to be faster. A waiting request is looked up "
    "more than once.",
    appears=_TIERS,
)
OFFLOAD_SAVES = _counter("offload_saves", Unit.COUNT, "Saves: paths of blocks handed to the tiers.", appears=_TIERS)
OFFLOAD_TAIL_SAVES = _counter(
    "offload_tail_saves", Unit.COUNT, "Saves at the end of a request, which include decoded blocks.", appears=_TIERS
)
OFFLOAD_FAILED_SAVES = _gauge(
    "offload_failed_saves_in_a_row",
    Unit.COUNT,
    "Consecutive saves that failed without saving a block. From 8 on the tiers accept no saves.",
    appears=_TIERS,
)
OFFLOAD_LOOKED_UP = _counter(
    "offload_looked_up_tokens",
    Unit.TOKENS,
    "Prompt tokens missing in HBM and looked up in the tiers below.",
    appears=_TIERS,
)
OFFLOAD_FOUND = _counter(
    "offload_found_tokens", Unit.TOKENS, "Looked-up prompt tokens found in a tier below HBM.", appears=_TIERS
)
OFFLOAD_COLLISIONS = _counter(
    "offload_collisions",
    Unit.BLOCKS,
    "Blocks with an equal hash and different tokens; they are never used.",
    appears=_TIERS,
)
OFFLOAD_GUARD_ERRORS = _counter(
    "offload_guard_errors",
    Unit.COUNT,
    "Exceptions of the connector, contained so that the engine's loop runs on: a defect of kvgate.",
    appears=_TIERS,
)
OFFLOAD_WORKER_FAULTS = _counter(
    "offload_worker_faults", Unit.COUNT, "Exceptions of transfer workers: a defect of kvgate.", appears=_TIERS
)
OFFLOAD_BLOCKS = _counter(
    "offload_blocks",
    Unit.BLOCKS,
    "KV blocks by requested operation and result.",
    "operation",
    "status",
    "reason",
    appears=f"{_TIERS}, after the first transfer",
)
OFFLOAD_LOOKUP_P50 = _gauge(
    "offload_lookup_p50_seconds",
    Unit.SECONDS,
    "Median time that a look-up below HBM blocks the engine's loop, since the start; 0 before the first.",
    appears=_TIERS,
)
OFFLOAD_LOOKUP_P99 = _gauge(
    "offload_lookup_p99_seconds",
    Unit.SECONDS,
    "99th percentile of the time that a look-up below HBM blocks the engine's loop.",
    appears=_TIERS,
)
PREFETCH_BLOCKS = _counter(
    "prefetch_blocks",
    Unit.BLOCKS,
    "KV blocks prefetched from NVMe, by outcome.",
    "outcome",
    appears=f"{_TIERS} and a prefetch probability",
)

# Paths between the tiers.
PATH_MOVED_BYTES = _counter("path_moved_bytes", Unit.BYTES, "Bytes moved between two tiers.", "path", appears=_TIERS)
PATH_FAILED_BLOCKS = _counter(
    "path_failed_blocks", Unit.BLOCKS, "KV blocks that failed to move along a path.", "path", appears=_TIERS
)
PATH_QUEUED_BLOCKS = _gauge("path_queued_blocks", Unit.BLOCKS, "KV blocks queued for a path.", "path", appears=_TIERS)
PATH_BANDWIDTH = _gauge(
    "path_bytes_per_second",
    Unit.BYTES_PER_SECOND,
    "Measured bandwidth of a path, 0 before the first measurement.",
    "path",
    appears=_TIERS,
)

# What the cost model expects.
PREFILL_SPEED = _gauge(
    "prefill_tokens_per_second",
    Unit.TOKENS_PER_SECOND,
    "Measured prefill speed, 0 before the first measurement.",
    appears=_TIERS,
)
COST_PREDICTIONS = _counter(
    "cost_predictions",
    Unit.COUNT,
    "Predictions of the cost model whose actual time was observed.",
    "quantity",
    appears=_TIERS,
)
COST_ERROR = _gauge(
    "cost_relative_error",
    Unit.RATIO,
    "|predicted - actual| / actual of the cost model's times, as a moving average; 0 before the first.",
    "quantity",
    appears=_TIERS,
)
COST_BIAS = _gauge(
    "cost_bias_ratio",
    Unit.RATIO,
    "(predicted - actual) / actual of the cost model's times, as a moving average; 0 before the first.",
    "quantity",
    appears=_TIERS,
)
MIGRATION_JUDGED = _counter(
    "migration_judged_blocks",
    Unit.BLOCKS,
    "KV blocks whose migration along a path was assessed: worth its cost, not worth it, and declined for that reason.",
    "path",
    "verdict",
    appears=f"{_TIERS}, after the first assessment",
)
MIGRATION_BENEFIT = _gauge(
    "migration_net_benefit_seconds",
    Unit.SECONDS,
    "Expected net benefit of the moves so far: seconds saved minus seconds spent.",
    "path",
    appears=f"{_TIERS}, after the first assessment",
)
LOAD_BREAK_EVEN = _gauge(
    "load_break_even_blocks",
    Unit.BLOCKS,
    "Least number of blocks for which a load from a tier is faster than computing, -1 if none is.",
    "tier",
    appears=f"{_TIERS}, once both speeds are measured",
)

# Policies.
POLICY_SWAPS = Series(
    name="kv_policy_swaps",
    kind=Kind.COUNTER,
    unit=Unit.COUNT,
    help="Policy swaps in the running instance.",
    labels=("kind", "tier"),
    appears=_POLICIES,
)
POLICY_REFUSED = Series(
    name="kv_policy_refused_swaps",
    kind=Kind.COUNTER,
    unit=Unit.COUNT,
    help="Policy swaps that were refused.",
    appears=_POLICIES,
)
POLICY_EVICTED = _counter(
    "policy_evicted_blocks", Unit.BLOCKS, "Eviction victims chosen by a policy.", "tier", appears=_POLICIES
)
POLICY_IN_CHARGE = _gauge(
    "policy_in_charge",
    Unit.STATE,
    "1 for the policy that chooses a tier's eviction victims; `lmdeploy` after an error of the policy.",
    "tier",
    "policy",
    appears=_POLICIES,
)
PREFIX_QUERY = _counter("prefix_query_tokens", Unit.TOKENS, "Prompt tokens looked up in HBM.", appears=_POLICIES)
PREFIX_HIT = _counter("prefix_hit_tokens", Unit.TOKENS, "Looked-up prompt tokens found in HBM.", appears=_POLICIES)
ADAPTIVE_WEIGHT = _gauge(
    "adaptive_weight",
    Unit.COUNT,
    "Factor by which blocks that were reused age more slowly; 1 is LRU.",
    appears=_ADAPTIVE,
)
ADAPTIVE_HITS = _counter(
    "adaptive_hits", Unit.TOKENS, "Prompt tokens found, counted by the guard of `adaptive`.", appears=_ADAPTIVE
)
ADAPTIVE_LRU_HITS = _counter(
    "adaptive_lru_hits",
    Unit.TOKENS,
    "Prompt tokens that an LRU cache of the same size would have found.",
    appears=_ADAPTIVE,
)
ADAPTIVE_SWITCHES = _counter("adaptive_switches", Unit.COUNT, "Changes of the weight of `adaptive`.", appears=_ADAPTIVE)
SHADOW_LOOKUPS = _counter(
    "shadow_lookups",
    Unit.BLOCKS,
    f"Sampled blocks looked up in a shadow policy's cache; {_ANEW}.",
    "policy",
    appears=_SHADOWS,
)
SHADOW_HITS = _counter(
    "shadow_hits", Unit.BLOCKS, f"Sampled blocks found in a shadow policy's cache; {_ANEW}.", "policy", appears=_SHADOWS
)
SHADOW_RATIO = _gauge(
    "shadow_hit_ratio",
    Unit.RATIO,
    "Hit ratio of a shadow policy in the last complete window.",
    "policy",
    appears=f"{_SHADOWS}, after the first whole minute with look-ups",
)
SHADOW_REQUESTS = _counter(
    "shadow_requests", Unit.REQUESTS, f"Requests replayed in the shadow policies; {_ANEW}.", appears=_SHADOWS
)
SHADOW_SKIPPED = _counter(
    "shadow_skipped",
    Unit.COUNT,
    f"Requests and stores that the shadow policies skipped to stay below 1 % of a core; {_ANEW}.",
    appears=_SHADOWS,
)
SHADOW_BUSY = _counter(
    "shadow_busy_seconds",
    Unit.SECONDS,
    f"Time of the engine's thread spent in shadow policies; {_ANEW}.",
    appears=_SHADOWS,
)

# Prompts that change hands.
HANDOVERS = _counter(
    "handovers",
    Unit.REQUESTS,
    "Handovers of prompts by outcome. At the prefill instance: handed_over (to another instance), expired (no instance "
    "fetched the prompt) and released (the client left). At the decode instance: fetched, and recomputed (the fetch "
    "failed).",
    "outcome",
    appears=_HANDS_OVER,
)
HANDOVERS_RECOMPUTED = _counter(
    "handovers_recomputed",
    Unit.REQUESTS,
    "Prompts that this instance computed because fetching them from another instance failed, by reason.",
    "reason",
    appears=f"{_HANDS_OVER}, after the first",
)
HANDOVER_BYTES = _counter(
    "handover_bytes", Unit.BYTES, "Bytes of KV received from other instances.", appears=_HANDS_OVER
)
HANDOVER_SECONDS = _counter(
    "handover_seconds",
    Unit.SECONDS,
    "Time that requests waited for KV from other instances, failed fetches included.",
    appears=_HANDS_OVER,
)
HELD_PROMPTS = _gauge("held_prompts", Unit.REQUESTS, "Computed prompts that wait to be fetched.", appears=_HANDS_OVER)
HELD_BLOCKS = _gauge(
    "held_blocks", Unit.BLOCKS, "KV blocks of computed prompts that wait to be fetched.", appears=_HANDS_OVER
)

# The waiting queue.
QUEUE_WAITING = _gauge(
    "waiting_requests",
    Unit.REQUESTS,
    "Requests waiting in the engine's queue, by priority.",
    "priority",
    appears=_POLICIES,
)
QUEUE_WAIT = Series(
    name="kvgate_engine_queue_wait_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time that requests waited in the engine's queue before they started, by priority.",
    labels=("priority",),
    buckets=WAIT_BUCKETS_S,
    appears=_POLICIES,
)
QUEUE_LEFT = _counter(
    "queue_left",
    Unit.REQUESTS,
    "Requests that left the engine's queue before they started.",
    "priority",
    appears=_POLICIES,
)
QUEUE_OLDEST = _gauge(
    "queue_oldest_seconds", Unit.SECONDS, "Waiting time of the request that has waited longest.", appears=_POLICIES
)
QUEUE_PROMOTIONS = _counter(
    "queue_promotions",
    Unit.REQUESTS,
    "Requests started because they had waited for the ageing bound.",
    appears=_POLICIES,
)
QUEUE_RETURNED = _counter(
    "queue_returned",
    Unit.REQUESTS,
    "Requests returned to the queue: preempted, or loaded from a tier.",
    appears=_POLICIES,
)
QUEUE_ERRORS = _counter(
    "queue_errors",
    Unit.COUNT,
    "Exceptions of the strategy, a defect of kvgate: from then on LMDeploy's own order applies.",
    appears=_POLICIES,
)
QUEUE_REPAIRS = _counter(
    "queue_repairs",
    Unit.COUNT,
    "Rebuilds of the queue from LMDeploy's own, a defect of kvgate.",
    appears=_POLICIES,
)
SCHEDULE_IN_CHARGE = _gauge(
    "schedule_in_charge",
    Unit.STATE,
    "1 for the strategy that orders waiting requests; `lmdeploy` after an error of the strategy.",
    "strategy",
    appears=_POLICIES,
)

# Steps.
_STEPS: Final = "from the engine's first step on"
STEP_SECONDS = Series(
    name="kvgate_engine_step_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time of a step on the device by kind: prefill (whole prompts, or the last chunk of one), chunk (of a long "
    "prompt), "
    "decode (a token of each running answer), other.",
    labels=("kind",),
    buckets=STEP_BUCKETS_S,
    appears=_STEPS,
)
STEP_SEQUENCES = Series(
    name="kvgate_engine_step_sequences",
    kind=Kind.HISTOGRAM,
    unit=Unit.REQUESTS,
    help="Sequences computed in a step.",
    labels=("kind",),
    buckets=tuple(map(float, STEP_SEQUENCE_BUCKETS)),
    appears=_STEPS,
)
DEVICE_IDLE = Series(
    name="kvgate_engine_device_idle_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    help="Idle time of the device before a step by reason: no_work (no request), kv (requests wait until KV blocks "
    "are loaded "
    "or freed), host (the host had not launched the step yet).",
    labels=("reason",),
    buckets=IDLE_SECONDS,
    appears=_STEPS,
)
STEP_TOKENS = _counter("step_tokens", Unit.TOKENS, "Tokens computed by steps.", "kind", appears=_STEPS)
STALLED_SECONDS = _counter(
    "stalled_answer_seconds",
    Unit.SECONDS,
    "Time that running answers waited during steps without a token for them, summed over the answers.",
    appears=_STEPS,
)
WAITED_SECONDS = _counter(
    "waiting_request_seconds",
    Unit.SECONDS,
    "Time that requests waited in the queue while steps ran, summed over the requests.",
    appears=_STEPS,
)
STEPS_LOST = _counter(
    "steps_lost", Unit.COUNT, "Steps without a measurement because the engine went to sleep or failed.", appears=_STEPS
)

PACE_IN_CHARGE = _gauge(
    "pace_in_charge",
    Unit.STATE,
    "1 for the pace that chooses between prefill and decode steps; `lmdeploy` after an error of the pace.",
    "pace",
    appears=_POLICIES,
)
PACE_TARGET = _gauge(
    "itl_target_seconds", Unit.SECONDS, "Target of the inter-token latency, 0 for none.", appears=_POLICIES
)
PACE_CHUNK = _gauge("chunk_tokens", Unit.TOKENS, "Largest chunk of a prompt beside running answers.", appears=_POLICIES)
PACE_STEPS = _counter(
    "paced_steps",
    Unit.COUNT,
    "Steps by the reason for their kind: owed (decode steps due after prompts), chunk, prompt, no_prompt, "
    "nobody_answers "
    "(no answer runs), no_room (too few free blocks for the waiting prompts).",
    "reason",
    appears="while a pace of kvgate is in use",
)
PACE_UNMET = _gauge(
    "itl_target_unmet",
    Unit.STATE,
    "1 when the inter-token latency target cannot be kept; the log has the reason.",
    appears=_POLICIES,
)
PACE_OVERTOOK = _counter(
    "overtaking_prompts",
    Unit.COUNT,
    "Prompts that were computed before the rest of a longer one, by outcome: overtook, gave_way (found no room and "
    "waited again).",
    "outcome",
    appears=_POLICIES,
)
PACE_ERRORS = _counter(
    "pace_errors",
    Unit.COUNT,
    "Exceptions of the pace, a defect of kvgate: from then on LMDeploy's own rule applies.",
    appears=_POLICIES,
)

ENGINE: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Series))
"""All of them, as they stand above."""
