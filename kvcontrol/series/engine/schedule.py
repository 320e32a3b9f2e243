"""The waiting queue and the steps of an engine."""

from typing import Final

from kvcontrol.core.policy_control import WAIT_BUCKETS_S
from kvcontrol.core.steps import IDLE_SECONDS
from kvcontrol.core.steps import STEP_SECONDS as STEP_BUCKETS_S
from kvcontrol.core.steps import STEP_SEQUENCES as STEP_SEQUENCE_BUCKETS
from kvcontrol.series.engine.families import counter, gauge
from kvcontrol.series.series import Kind, Series, Unit

_POLICIES: Final = "from the engine process's first reply on"

# The waiting queue.
QUEUE_WAITING = gauge(
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
QUEUE_LEFT = counter(
    "queue_left",
    Unit.REQUESTS,
    "Requests that left the engine's queue before they started.",
    "priority",
    appears=_POLICIES,
)
QUEUE_OLDEST = gauge(
    "queue_oldest_seconds", Unit.SECONDS, "Waiting time of the request that has waited longest.", appears=_POLICIES
)
QUEUE_PROMOTIONS = counter(
    "queue_promotions",
    Unit.REQUESTS,
    "Requests started because they had waited for the ageing bound.",
    appears=_POLICIES,
)
QUEUE_RETURNED = counter(
    "queue_returned",
    Unit.REQUESTS,
    "Requests returned to the queue: preempted, or loaded from a tier.",
    appears=_POLICIES,
)
QUEUE_ERRORS = counter(
    "queue_errors",
    Unit.COUNT,
    "Exceptions of the strategy, a defect of kvgate: from then on LMDeploy's own order applies.",
    appears=_POLICIES,
)
QUEUE_REPAIRS = counter(
    "queue_repairs",
    Unit.COUNT,
    "Rebuilds of the queue from LMDeploy's own, a defect of kvgate.",
    appears=_POLICIES,
)
SCHEDULE_IN_CHARGE = gauge(
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
STEP_TOKENS = counter("step_tokens", Unit.TOKENS, "Tokens computed by steps.", "kind", appears=_STEPS)
STALLED_SECONDS = counter(
    "stalled_answer_seconds",
    Unit.SECONDS,
    "Time that running answers waited during steps without a token for them, summed over the answers.",
    appears=_STEPS,
)
WAITED_SECONDS = counter(
    "waiting_request_seconds",
    Unit.SECONDS,
    "Time that requests waited in the queue while steps ran, summed over the requests.",
    appears=_STEPS,
)
STEPS_LOST = counter(
    "steps_lost", Unit.COUNT, "Steps without a measurement because the engine went to sleep or failed.", appears=_STEPS
)

PACE_IN_CHARGE = gauge(
    "pace_in_charge",
    Unit.STATE,
    "1 for the pace that chooses between prefill and decode steps; `lmdeploy` after an error of the pace.",
    "pace",
    appears=_POLICIES,
)
PACE_TARGET = gauge(
    "itl_target_seconds", Unit.SECONDS, "Target of the inter-token latency, 0 for none.", appears=_POLICIES
)
PACE_CHUNK = gauge("chunk_tokens", Unit.TOKENS, "Largest chunk of a prompt beside running answers.", appears=_POLICIES)
PACE_STEPS = counter(
    "paced_steps",
    Unit.COUNT,
    "Steps by the reason for their kind: owed (decode steps due after prompts), chunk, prompt, no_prompt, "
    "nobody_answers "
    "(no answer runs), no_room (too few free blocks for the waiting prompts).",
    "reason",
    appears="while a pace of kvgate is in use",
)
PACE_UNMET = gauge(
    "itl_target_unmet",
    Unit.STATE,
    "1 when the inter-token latency target cannot be kept; the log has the reason.",
    appears=_POLICIES,
)
PACE_OVERTOOK = counter(
    "overtaking_prompts",
    Unit.COUNT,
    "Prompts that were computed before the rest of a longer one, by outcome: overtook, gave_way (found no room and "
    "waited again).",
    "outcome",
    appears=_POLICIES,
)
PACE_ERRORS = counter(
    "pace_errors",
    Unit.COUNT,
    "Exceptions of the pace, a defect of kvgate: from then on LMDeploy's own rule applies.",
    appears=_POLICIES,
)

SCHEDULE: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Series))
"""All of them, as they stand above."""
