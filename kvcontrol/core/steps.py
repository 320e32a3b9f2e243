"""The bodies of ``/kv/v1/steps``: what an engine computed step by step, where its device stood idle, and why.

JSON on the wire. A step is one forward of the model: prompts (``prefill``), a part of one long prompt (``chunk``), such
a part on a second stream of the device, beside decode steps (``overlapped``), the next token of every running answer
(``decode``), or anything else (``other``). The device is idle between two steps for one of three reasons: there was no
request (``no_work``), requests waited for KV blocks to be loaded or freed (``kv``), or the host had not launched the
next step yet (``host``).
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Final, Literal

import msgspec

STEPS_PATH: Final = "/kv/v1/steps"
KEPT_STEPS: Final = 8_192
"""The last steps that an instance remembers."""
SHOWN_STEPS: Final = 256
"""How many of them an answer has where the client asks for no number."""

StepKind = Literal["prefill", "chunk", "overlapped", "decode", "other"]
STEP_KINDS: Final[tuple[StepKind, ...]] = ("prefill", "chunk", "overlapped", "decode", "other")
IdleReason = Literal["no_work", "kv", "host"]
IDLE_REASONS: Final[tuple[IdleReason, ...]] = ("no_work", "kv", "host")
StepClock = Literal["cuda_events", "wall", "round_trip"]
"""How steps are timed: by events on the GPU's stream; by this process's clock (CPU); or, where the model runs in other
processes, from sending a step until its tokens are back."""

STEP_SECONDS: Final = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.010, 0.0125, 0.015, 0.020, 0.030, 0.040, 0.050, 0.060, 0.080),
    *(0.100, 0.150, 0.250, 0.500, 1.0, 2.5, 5.0, 10.0),
)
"""Upper ends of the buckets of a step's seconds."""
IDLE_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.010, 0.025, 0.1, 0.5, 2.5, 10.0)
"""Upper ends of the buckets of the idle time before a step."""
STEP_SEQUENCES: Final = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
"""Upper ends of the buckets of a step's sequences."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step. ``number`` counts from 1 since the instance started; ``began_s`` is in seconds since 1970.

    ``device_s`` is the time on the device, from the first operation of the forward to the last of sampling;
    ``launch_s`` is how long the host took to launch it (when both are equal, the host is what limits the step).
    ``no_work_s``, ``kv_s`` and ``host_s`` are the idle time of the device before it, ``overlapped_s`` the time before
    it in which the device computed an overlapped chunk alone. ``tokens`` are computed by it, ``history_tokens`` are the
    cached ones that it attended to. ``stalled`` counts the running answers that waited for
    this step without getting a token from it, ``waiting`` the requests in the queue when it was chosen, and ``reason``
    says why it was chosen.
    """

    number: int
    began_s: float
    kind: StepKind
    reason: str
    sequences: int
    tokens: int
    history_tokens: int
    device_s: float
    launch_s: float
    no_work_s: float
    kv_s: float
    host_s: float
    stalled: int
    waiting: int
    overlapped_s: float = 0.0

    @property
    def idle_s(self) -> float:
        return self.no_work_s + self.kv_s + self.host_s


class StepTotals(msgspec.Struct, kw_only=True):
    """Sums since the instance started: subtract an earlier answer from a later one for the time between them.

    ``device_s``, ``steps`` and ``tokens`` are by kind, ``idle_s`` by reason. Of overlapped chunks ``device_s`` has the
    time in which the device computed nothing else. ``stalled_s`` is the time that running
    answers waited for steps that gave them no token, ``waited_s`` the time that requests waited beside steps, both
    summed over the answers and requests.
    """

    steps: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(STEP_KINDS, 0))
    tokens: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(STEP_KINDS, 0))
    device_s: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(STEP_KINDS, 0.0))
    idle_s: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(IDLE_REASONS, 0.0))
    stalled_s: float = 0.0
    waited_s: float = 0.0

    def add(self, step: Step) -> None:
        kind = step.kind
        self.steps[kind] += 1
        self.tokens[kind] += step.tokens
        alone_s = 0.0 if kind == "overlapped" else step.device_s
        self.device_s[kind] += alone_s
        self.device_s["overlapped"] += step.overlapped_s
        self.idle_s["no_work"] += step.no_work_s
        self.idle_s["kv"] += step.kv_s
        self.idle_s["host"] += step.host_s
        self.stalled_s += step.stalled * alone_s
        self.waited_s += step.waiting * (alone_s + step.overlapped_s + step.kv_s + step.host_s)

    def minus(self, earlier: "StepTotals") -> "StepTotals":
        """Return what was added since ``earlier``."""
        return StepTotals(
            steps={kind: count - earlier.steps.get(kind, 0) for kind, count in self.steps.items()},
            tokens={kind: count - earlier.tokens.get(kind, 0) for kind, count in self.tokens.items()},
            device_s={kind: value - earlier.device_s.get(kind, 0.0) for kind, value in self.device_s.items()},
            idle_s={reason: value - earlier.idle_s.get(reason, 0.0) for reason, value in self.idle_s.items()},
            stalled_s=self.stalled_s - earlier.stalled_s,
            waited_s=self.waited_s - earlier.waited_s,
        )

    def plus(self, other: "StepTotals") -> "StepTotals":
        """Return the sums of two instances."""
        nothing = StepTotals()
        return self.minus(nothing.minus(other))

    def shares(self) -> dict[str, float]:
        """Return the share of the time by kind of step and by reason of idleness (``idle_host`` and so on); they sum
        up to 1, or are all 0 where nothing was measured.
        """
        seconds = {**self.device_s, **{f"idle_{reason}": value for reason, value in self.idle_s.items()}}
        whole_s = sum(seconds.values())
        return {name: (value / whole_s if whole_s > 0 else 0.0) for name, value in seconds.items()}


class StepHistograms(msgspec.Struct, kw_only=True):
    """Counts since the instance started, each bucket alone, the last one above all bounds; sums are in the totals.

    ``seconds`` and ``sequences`` are by kind, ``idle`` by reason (steps without such idleness are not in it);
    ``sequences_sum`` is by kind.
    """

    seconds: dict[str, list[int]] = msgspec.field(default_factory=lambda: _buckets(STEP_KINDS, STEP_SECONDS))
    sequences: dict[str, list[int]] = msgspec.field(default_factory=lambda: _buckets(STEP_KINDS, STEP_SEQUENCES))
    sequences_sum: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(STEP_KINDS, 0))
    idle: dict[str, list[int]] = msgspec.field(default_factory=lambda: _buckets(IDLE_REASONS, IDLE_SECONDS))

    def add(self, step: Step) -> None:
        self.seconds[step.kind][bisect_left(STEP_SECONDS, step.device_s)] += 1
        self.sequences[step.kind][bisect_left(STEP_SEQUENCES, step.sequences)] += 1
        self.sequences_sum[step.kind] += step.sequences
        for reason, idle_s in (("no_work", step.no_work_s), ("kv", step.kv_s), ("host", step.host_s)):
            if idle_s > 0:
                self.idle[reason][bisect_left(IDLE_SECONDS, idle_s)] += 1


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of seconds; zeros where there is nothing."""

    count: int
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


class StepsSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What some steps in a row took. ``span_s`` is their time with the idle time between them, ``shares`` the part of
    it by kind and by reason of idleness.

    ``pause`` is the time from one decode step's end to the next one's while answers ran all the while: what a client
    sees between two tokens of a running answer, apart from the way to it. ``host`` is the host's part of the idle time
    before a decode step.
    """

    steps: int
    span_s: float
    shares: dict[str, float]
    decode: Spread
    prefill: Spread
    pause: Spread
    host: Spread


class StepsReport(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /kv/v1/steps``: the last steps, the oldest first, a summary of these, and sums since the start.

    ``clock`` is how they were timed. ``lost`` counts steps that were dropped unmeasured (a sleeping engine, an error).
    """

    clock: StepClock
    totals: StepTotals
    lost: int
    summary: StepsSummary
    steps: list[Step]


class StepsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of them is wanted: the ``last`` so many, of those after number ``after``."""

    last: int = SHOWN_STEPS
    after: int = 0


def summarize(steps: Sequence[Step]) -> StepsSummary:
    """Return what these steps took; O(n log n)."""
    totals = StepTotals()
    for step in steps:
        totals.add(step)
    return StepsSummary(
        steps=len(steps),
        span_s=sum(totals.device_s.values()) + sum(totals.idle_s.values()),
        shares=totals.shares(),
        decode=spread(step.device_s for step in steps if step.kind == "decode"),
        prefill=spread(step.device_s for step in steps if step.kind in {"prefill", "chunk"}),
        pause=spread(pauses(steps)),
        host=spread(step.host_s for step in steps if step.kind == "decode"),
    )


def pauses(steps: Iterable[Step]) -> list[float]:
    """Return the seconds from each decode step's end to the next one's while some answer ran all the while."""
    found: list[float] = []
    since_s: float | None = None
    for step in steps:
        if step.kind == "overlapped":
            continue
        took_s = step.device_s + step.idle_s + step.overlapped_s
        if step.kind == "decode":
            if since_s is not None and not step.no_work_s:
                found.append(since_s + took_s)
            since_s = 0.0
        elif since_s is not None:
            since_s = since_s + took_s if step.stalled and not step.no_work_s else None
    return found


def spread(seconds: Iterable[float]) -> Spread:
    """Return the distribution of some durations (percentiles by the nearest rank)."""
    values = sorted(seconds)
    if not values:
        return Spread(count=0, mean_s=0.0, p50_s=0.0, p99_s=0.0, max_s=0.0)
    return Spread(
        count=len(values),
        mean_s=sum(values) / len(values),
        p50_s=_ranked(values, 0.5),
        p99_s=_ranked(values, 0.99),
        max_s=values[-1],
    )


def _ranked(values: Sequence[float], share: float) -> float:
    return values[max(0, ceil(share * len(values)) - 1)]


def _buckets(names: Iterable[str], ends: Sequence[float]) -> dict[str, list[int]]:
    return {name: [0] * (len(ends) + 1) for name in names}
