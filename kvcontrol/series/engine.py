"""What an engine instance exposes beside LMDeploy's own series: every series of ours, once."""

from typing import Final

from kvcontrol.core.policy_control import WAIT_BUCKETS_S
from kvcontrol.core.steps import IDLE_SECONDS
from kvcontrol.core.steps import STEP_SECONDS as STEP_BUCKETS_S
from kvcontrol.core.steps import STEP_SEQUENCES as STEP_SEQUENCE_BUCKETS
from kvcontrol.series.gateway import LAG_SECONDS
from kvcontrol.series.series import Kind, Series, Unit

_TIERS: Final = "with tiers below HBM"
_POLICIES: Final = "from the first answer of the engine process on"
_HANDS_OVER: Final = "where prompts are handed over"
_ADAPTIVE: Final = "while `adaptive` is in charge of HBM"
_SHADOWS: Final = "while shadow policies are followed"
_ANEW: Final = "begins at 0 when the list of shadow policies changes"


def _counter(name: str, unit: Unit, text: str, *labels: str, appears: str = "") -> Series:
    return Series(name=f"kvgate_engine_{name}", kind=Kind.COUNTER, unit=unit, help=text, labels=labels, appears=appears)


def _gauge(name: str, unit: Unit, text: str, *labels: str, appears: str = "") -> Series:
    return Series(name=f"kvgate_engine_{name}", kind=Kind.GAUGE, unit=unit, help=text, labels=labels, appears=appears)


# The engine process and its events.
UP = _gauge("up", Unit.STATE, "1 when the engine process answers; at 0, all other series of ours are absent.")
RESIDENT_BLOCKS = _gauge(
    "resident_blocks", Unit.BLOCKS, "KV blocks that a later request can reuse.", "tier", appears="with the first block"
)
KV_EVENTS = _counter("kv_events", Unit.BLOCKS, "KV events recorded: stored, removed, cleared.", "kind")
KV_EVENTS_SEQ = _gauge("kv_events_seq", Unit.COUNT, "Number of the last published event batch, -1 before it.")
KV_EVENTS_DROPPED = _counter("kv_events_dropped", Unit.COUNT, "KV events lost to a full queue.")
KV_EVENTS_RESYNCS = _counter("kv_events_resyncs", Unit.COUNT, "Times the whole state was published anew.")
HOOK_ERRORS = _counter("hook_errors", Unit.COUNT, "Changes of the block trie that could not be announced.")
EVICTION_ERRORS = _counter("eviction_errors", Unit.COUNT, "1 when LMDeploy's own eviction took over from the policy.")
PUBLISHER_ERRORS = _counter("publisher_errors", Unit.COUNT, "Failed turns of the event publisher.")
LOOP_LAG = Series(
    name="kvgate_engine_event_loop_lag_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    help="How much later than asked for an event loop of the instance woke: its api_server's, and the engine's.",
    labels=("process",),
    buckets=LAG_SECONDS,
)
TRACE_SPANS = _counter(
    "trace_spans",
    Unit.COUNT,
    "Spans that ended: exported, failed (the collector didn't take them), or dropped as too many waited for it.",
    "outcome",
    appears="with tracing",
)

# Tiers.
TIER_CAPACITY = _gauge("tier_capacity_blocks", Unit.BLOCKS, "KV blocks that a tier can hold.", "tier")
TIER_USED = _gauge("tier_used_blocks", Unit.BLOCKS, "KV blocks that take room in a tier.", "tier")
PINNED_BLOCKS = _gauge("pinned_blocks", Unit.BLOCKS, "KV blocks of pinned prefixes that a tier holds.", "tier")
TIER_BLOCK_BYTES = _gauge("tier_block_bytes", Unit.BYTES, "Size of a KV block in a tier.", "tier")
TIER_FRAGMENTATION = _gauge(
    "tier_fragmentation_ratio",
    Unit.RATIO,
    "Share of a tier's used bytes that holds no KV that a later request can reuse: in HBM, blocks that are partly "
    "filled or belong to one request alone; below, what rounding to pages costs.",
    "tier",
    appears="once something is used",
)
TIER_HIT_TOKENS = _counter(
    "tier_hit_tokens",
    Unit.TOKENS,
    "Prompt tokens found in a tier, each counted for the fastest one that had it.",
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
    "Bytes that others never push a tenant below.",
    "tier",
    "tenant",
    appears=_TIERS,
)
TENANT_BURST = _gauge(
    "tenant_burst_bytes",
    Unit.BYTES,
    "Bytes that a tenant may fill at most.",
    "tier",
    "tenant",
    appears=f"{_TIERS}, for tenants with a burst limit",
)
TENANT_VIOLATIONS = _counter(
    "tenant_over_burst_blocks",
    Unit.BLOCKS,
    "Quota violations: blocks that a tenant's burst limit evicted or refused. A tenant without blocks may lose its "
    "count; see tenant_hit_blocks for `other`.",
    "tier",
    "tenant",
    appears=_TIERS,
)
TENANT_HITS = _counter(
    "tenant_hit_blocks",
    Unit.BLOCKS,
    "Blocks of a tenant that loads found in a tier. `other` is the sum of tenants without a series; it changes, down "
    "as well, when a tenant gets a series or loses it.",
    "tier",
    "tenant",
    appears=_TIERS,
)

# Offloading and loading.
OFFLOAD_LOADS = _counter("offload_loads", Unit.REQUESTS, "Requests restored from below HBM.", appears=_TIERS)
OFFLOAD_FAILED_LOADS = _counter(
    "offload_failed_loads",
    Unit.REQUESTS,
    "Requests whose restore failed and whose tokens were computed.",
    appears=_TIERS,
)
OFFLOAD_DECLINED_LOADS = _counter(
    "offload_declined_loads",
    Unit.COUNT,
    "Look-ups after which computing was expected to be faster; a request that waits is looked up more than once.",
    appears=_TIERS,
)
OFFLOAD_SAVES = _counter("offload_saves", Unit.COUNT, "Paths of blocks given to the tiers.", appears=_TIERS)
OFFLOAD_TAIL_SAVES = _counter(
    "offload_tail_saves", Unit.COUNT, "Those at the end of a request, with decoded blocks.", appears=_TIERS
)
OFFLOAD_FAILED_SAVES = _gauge(
    "offload_failed_saves_in_a_row",
    Unit.COUNT,
    "Saves of which no block arrived, for faults, since one last did; 8 and more: the tiers keep nothing.",
    appears=_TIERS,
)
OFFLOAD_LOOKED_UP = _counter(
    "offload_looked_up_tokens", Unit.TOKENS, "Prompt tokens that HBM did not hold, looked up below.", appears=_TIERS
)
OFFLOAD_FOUND = _counter("offload_found_tokens", Unit.TOKENS, "Those that were found.", appears=_TIERS)
OFFLOAD_COLLISIONS = _counter(
    "offload_collisions",
    Unit.BLOCKS,
    "Blocks whose hash was equal and whose tokens were not; never used.",
    appears=_TIERS,
)
OFFLOAD_GUARD_ERRORS = _counter(
    "offload_guard_errors",
    Unit.COUNT,
    "Failures of the connector, kept from the engine's loop: a defect of kvgate.",
    appears=_TIERS,
)
OFFLOAD_WORKER_FAULTS = _counter(
    "offload_worker_faults", Unit.COUNT, "Failures of transfer workers: a defect of kvgate.", appears=_TIERS
)
OFFLOAD_BLOCKS = _counter(
    "offload_blocks",
    Unit.BLOCKS,
    "KV blocks by what was asked and how it ended.",
    "operation",
    "status",
    "reason",
    appears=f"{_TIERS}, after the first transfer",
)
OFFLOAD_LOOKUP_P50 = _gauge(
    "offload_lookup_p50_seconds",
    Unit.SECONDS,
    "Median time that a look-up below HBM holds the engine's loop, since the start; 0 before the first.",
    appears=_TIERS,
)
OFFLOAD_LOOKUP_P99 = _gauge("offload_lookup_p99_seconds", Unit.SECONDS, "99th percentile of the same.", appears=_TIERS)
PREFETCH_BLOCKS = _counter(
    "prefetch_blocks",
    Unit.BLOCKS,
    "KV blocks brought up from NVMe before a request came, and what became of them.",
    "outcome",
    appears=f"{_TIERS} and a prefetch probability",
)

# Paths between the tiers.
PATH_MOVED_BYTES = _counter("path_moved_bytes", Unit.BYTES, "Bytes moved between two tiers.", "path", appears=_TIERS)
PATH_FAILED_BLOCKS = _counter(
    "path_failed_blocks", Unit.BLOCKS, "KV blocks that a path failed to move.", "path", appears=_TIERS
)
PATH_QUEUED_BLOCKS = _gauge(
    "path_queued_blocks", Unit.BLOCKS, "KV blocks that wait for a path.", "path", appears=_TIERS
)
PATH_BANDWIDTH = _gauge(
    "path_bytes_per_second", Unit.BYTES_PER_SECOND, "Measured bandwidth of a path, 0 before.", "path", appears=_TIERS
)

# What the cost model expects.
PREFILL_SPEED = _gauge(
    "prefill_tokens_per_second", Unit.TOKENS_PER_SECOND, "Measured speed of computing, 0 before.", appears=_TIERS
)
COST_PREDICTIONS = _counter(
    "cost_predictions", Unit.COUNT, "Predicted seconds whose outcome was seen.", "quantity", appears=_TIERS
)
COST_ERROR = _gauge(
    "cost_relative_error",
    Unit.RATIO,
    "|predicted - actual| / actual of the cost model's seconds, a fading average; 0 before.",
    "quantity",
    appears=_TIERS,
)
COST_BIAS = _gauge(
    "cost_bias_ratio", Unit.RATIO, "(predicted - actual) / actual, likewise.", "quantity", appears=_TIERS
)
MIGRATION_JUDGED = _counter(
    "migration_judged_blocks",
    Unit.BLOCKS,
    "KV blocks whose way down a path was judged: worth it, not worth it, and declined therefore.",
    "path",
    "verdict",
    appears=f"{_TIERS}, after the first judgement",
)
MIGRATION_BENEFIT = _gauge(
    "migration_net_benefit_seconds",
    Unit.SECONDS,
    "Seconds that the moves made so far are expected to save, less what they cost.",
    "path",
    appears=f"{_TIERS}, after the first judgement",
)
LOAD_BREAK_EVEN = _gauge(
    "load_break_even_blocks",
    Unit.BLOCKS,
    "Blocks from which on a load from a tier beats computing, -1 where it never does.",
    "tier",
    appears=f"{_TIERS}, once both speeds are measured",
)

# Policies.
POLICY_SWAPS = Series(
    name="kv_policy_swaps",
    kind=Kind.COUNTER,
    unit=Unit.COUNT,
    help="Policies exchanged in the running instance.",
    labels=("kind", "tier"),
    appears=_POLICIES,
)
POLICY_REFUSED = Series(
    name="kv_policy_refused_swaps",
    kind=Kind.COUNTER,
    unit=Unit.COUNT,
    help="Changes of policy that were refused.",
    appears=_POLICIES,
)
POLICY_EVICTED = _counter(
    "policy_evicted_blocks", Unit.BLOCKS, "KV blocks that a policy chose.", "tier", appears=_POLICIES
)
POLICY_IN_CHARGE = _gauge(
    "policy_in_charge",
    Unit.STATE,
    "1 for the policy that chooses what leaves a tier; `lmdeploy` after an error of the policy.",
    "tier",
    "policy",
    appears=_POLICIES,
)
PREFIX_QUERY = _counter("prefix_query_tokens", Unit.TOKENS, "Prompt tokens looked up in HBM.", appears=_POLICIES)
PREFIX_HIT = _counter("prefix_hit_tokens", Unit.TOKENS, "Those that were found.", appears=_POLICIES)
ADAPTIVE_WEIGHT = _gauge(
    "adaptive_weight", Unit.COUNT, "How many times as slowly blocks that came again age; 1 is LRU.", appears=_ADAPTIVE
)
ADAPTIVE_HITS = _counter(
    "adaptive_hits", Unit.TOKENS, "Prompt tokens found, as the guard counts them.", appears=_ADAPTIVE
)
ADAPTIVE_LRU_HITS = _counter(
    "adaptive_lru_hits", Unit.TOKENS, "Those that an LRU cache would have found.", appears=_ADAPTIVE
)
ADAPTIVE_SWITCHES = _counter("adaptive_switches", Unit.COUNT, "Changes of the weight.", appears=_ADAPTIVE)
SHADOW_LOOKUPS = _counter(
    "shadow_lookups",
    Unit.BLOCKS,
    f"Sampled blocks that a shadow policy was asked for; {_ANEW}.",
    "policy",
    appears=_SHADOWS,
)
SHADOW_HITS = _counter(
    "shadow_hits", Unit.BLOCKS, f"Those that it would have found; {_ANEW}.", "policy", appears=_SHADOWS
)
SHADOW_RATIO = _gauge(
    "shadow_hit_ratio",
    Unit.RATIO,
    "Share that it would have found in the last whole window.",
    "policy",
    appears=f"{_SHADOWS}, after the first whole minute with look-ups",
)
SHADOW_REQUESTS = _counter(
    "shadow_requests", Unit.REQUESTS, f"Requests that shadow policies followed; {_ANEW}.", appears=_SHADOWS
)
SHADOW_SKIPPED = _counter(
    "shadow_skipped",
    Unit.COUNT,
    f"Requests and stores that they left out to stay below 1 % of a core; {_ANEW}.",
    appears=_SHADOWS,
)
SHADOW_BUSY = _counter(
    "shadow_busy_seconds", Unit.SECONDS, f"Time of the engine's thread that they took; {_ANEW}.", appears=_SHADOWS
)

# Prompts that change hands.
HANDOVERS = _counter(
    "handovers",
    Unit.REQUESTS,
    "Prompts that changed hands, or were to: handed_over (to another instance), expired (nobody fetched it) and "
    "released (its client left) where it was computed; fetched and recomputed (it could not be had) where it is "
    "answered.",
    "outcome",
    appears=_HANDS_OVER,
)
HANDOVERS_RECOMPUTED = _counter(
    "handovers_recomputed",
    Unit.REQUESTS,
    "Prompts that could not be had from another instance and were computed here, by what went wrong.",
    "reason",
    appears=f"{_HANDS_OVER}, after the first",
)
HANDOVER_BYTES = _counter("handover_bytes", Unit.BYTES, "KV that came from other instances.", appears=_HANDS_OVER)
HANDOVER_SECONDS = _counter(
    "handover_seconds",
    Unit.SECONDS,
    "Time that requests have waited for KV from other instances, those in vain included.",
    appears=_HANDS_OVER,
)
HELD_PROMPTS = _gauge(
    "held_prompts", Unit.REQUESTS, "Computed prompts that wait to be fetched by a ticket.", appears=_HANDS_OVER
)
HELD_BLOCKS = _gauge("held_blocks", Unit.BLOCKS, "KV blocks of these.", appears=_HANDS_OVER)

# The waiting queue.
QUEUE_WAITING = _gauge(
    "waiting_requests",
    Unit.REQUESTS,
    "Requests that wait in the engine's queue now, by their priority.",
    "priority",
    appears=_POLICIES,
)
QUEUE_WAIT = Series(
    name="kvgate_engine_queue_wait_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    help="How long requests had waited in the engine when they were started, by their priority.",
    labels=("priority",),
    buckets=WAIT_BUCKETS_S,
    appears=_POLICIES,
)
QUEUE_LEFT = _counter(
    "queue_left",
    Unit.REQUESTS,
    "Requests that left the engine's queue without having been started.",
    "priority",
    appears=_POLICIES,
)
QUEUE_OLDEST = _gauge(
    "queue_oldest_seconds", Unit.SECONDS, "How long the one that waits longest has waited.", appears=_POLICIES
)
QUEUE_PROMOTIONS = _counter(
    "queue_promotions",
    Unit.REQUESTS,
    "Requests that were started for their age: they had waited the ageing bound.",
    appears=_POLICIES,
)
QUEUE_RETURNED = _counter(
    "queue_returned",
    Unit.REQUESTS,
    "Times that a request came back to the queue: preempted, or loaded from a tier.",
    appears=_POLICIES,
)
QUEUE_ERRORS = _counter(
    "queue_errors",
    Unit.COUNT,
    "Failures of the strategy, a defect of kvgate: from then on LMDeploy's own order is in charge.",
    appears=_POLICIES,
)
QUEUE_REPAIRS = _counter(
    "queue_repairs",
    Unit.COUNT,
    "Times the queue was built anew from LMDeploy's, a defect of kvgate.",
    appears=_POLICIES,
)
SCHEDULE_IN_CHARGE = _gauge(
    "schedule_in_charge",
    Unit.STATE,
    "1 for the strategy that orders what waits; `lmdeploy` after an error of the strategy.",
    "strategy",
    appears=_POLICIES,
)

# Steps.
_STEPS: Final = "from the engine's first step on"
STEP_SECONDS = Series(
    name="kvgate_engine_step_seconds",
    kind=Kind.HISTOGRAM,
    unit=Unit.SECONDS,
    help="Time of a step on the device: prefill (whole prompts, or the last chunk of one), chunk (of a long prompt), "
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
    help="Idle time of the device before a step: no_work (no request), kv (requests wait for KV blocks to be loaded or "
    "freed), host (the step was not launched yet).",
    labels=("reason",),
    buckets=IDLE_SECONDS,
    appears=_STEPS,
)
STEP_TOKENS = _counter("step_tokens", Unit.TOKENS, "Tokens computed by steps.", "kind", appears=_STEPS)
STALLED_SECONDS = _counter(
    "stalled_answer_seconds",
    Unit.SECONDS,
    "Time that running answers waited for steps that gave them no token, summed over the answers.",
    appears=_STEPS,
)
WAITED_SECONDS = _counter(
    "waiting_request_seconds",
    Unit.SECONDS,
    "Time that requests waited in the queue beside the engine's steps, summed over the requests.",
    appears=_STEPS,
)
STEPS_LOST = _counter(
    "steps_lost", Unit.COUNT, "Steps that were not measured: the engine went to sleep, or failed.", appears=_STEPS
)

PACE_IN_CHARGE = _gauge(
    "pace_in_charge",
    Unit.STATE,
    "1 for the pace of the steps; `lmdeploy` after an error of the pace.",
    "pace",
    appears=_POLICIES,
)
PACE_TARGET = _gauge(
    "itl_target_seconds", Unit.SECONDS, "Inter-token latency asked for, 0 for none.", appears=_POLICIES
)
PACE_CHUNK = _gauge(
    "chunk_tokens", Unit.TOKENS, "Prompt tokens of a chunk beside running answers, at most.", appears=_POLICIES
)
PACE_STEPS = _counter(
    "paced_steps",
    Unit.COUNT,
    "Steps by why they were chosen: owed (decode steps after prompts), chunk, prompt, no_prompt, nobody_answers, "
    "no_room (prompts for which there was no room).",
    "reason",
    appears="while a pace of ours is in charge",
)
PACE_UNMET = _gauge(
    "itl_target_unmet", Unit.STATE, "1 when the target can't be kept; the log says why.", appears=_POLICIES
)
PACE_ERRORS = _counter(
    "pace_errors",
    Unit.COUNT,
    "Failures of the pace, a defect of kvgate: from then on LMDeploy's own rule is in charge.",
    appears=_POLICIES,
)

ENGINE: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Series))
"""All of them, as they stand above."""
