"""What a strategy does to those that wait: one engine in virtual time, the same requests for every strategy.

A model of an engine, not one: a step computes up to ``step_tokens`` of prompts at ``prefill_tokens_per_s`` and one
token of every running answer in ``decode_s`` more; a request takes one of ``slots`` from its prefill to its last token;
nothing is cached, so what a strategy gains by locality doesn't show. Figures compare strategies, they predict no
service.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcontrol.scheduler_ir.strategies import EngineView, WaitingId, WaitingQueue, WaitingRequest
from lab.research.fairness import jain_index

DEADLINES_S = (2.0, 10.0, 60.0)
"""When first tokens are due: of interactive requests, ordinary ones and batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """How fast the virtual engine is."""

    prefill_tokens_per_s: float = 20_000.0
    decode_s: float = 0.02
    slots: int = 64
    step_tokens: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How one strategy served a workload. ``in_time_percent`` of all first tokens came by their deadline;
    ``high_wait_p99_s`` is of the most important class; ``fairness`` is Jain's index over the tenants' shares of first
    tokens in time.
    """

    strategy: str
    workload: str
    requests: int
    wait_p50_s: float
    wait_p99_s: float
    wait_max_s: float
    high_wait_p99_s: float
    in_time_percent: float
    tokens_per_s: float
    fairness: float


@dataclass(slots=True)
class _Tally:
    waits_s: list[float] = field(default_factory=list)
    high_s: list[float] = field(default_factory=list)
    in_time: dict[str, list[bool]] = field(default_factory=dict)


def requests_of(
    lengths: Iterable[tuple[int, int]], *, load: float, model: EngineModel, seed: int = 0
) -> list[WaitingRequest]:
    """Return requests with these tokens of prompt and answer, coming at ``load`` times what the engine can do.

    In one of five stretches they come three times as often. Every second request is one tenant's.
    """
    sizes = list(lengths)
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    work_s = sum(
        prompt / model.prefill_tokens_per_s + answer * model.decode_s / model.slots for prompt, answer in sizes
    )
    mean_gap_s = work_s / len(sizes) / load
    asked, now_s = [], 0.0
    for number, (prompt, answer) in enumerate(sizes):
        busy = number // 50 % 5 == 0
        now_s += rng.expovariate(1.0) * mean_gap_s * (1 / 3 if busy else 7 / 6)
        importance = rng.choice((0, 1, 1, 1, 2))
        asked.append(
            WaitingRequest(
                request_id=WaitingId(f"r{number}"),
                arrived_s=now_s,
                prefill_tokens=prompt,
                output_tokens=answer,
                priority=1 - importance,
                deadline_s=now_s + DEADLINES_S[importance],
                tenant=f"t{rng.choice((0, 0, 0, 1, 2, 3))}",
                model=rng.choice(("", "a", "b")),
                prefix=rng.randrange(64),
            )
        )
    return asked


def serve(
    make: Callable[[], WaitingQueue], asked: Sequence[WaitingRequest], *, workload: str, model: EngineModel
) -> Served:
    """Run all requests through a strategy."""
    queue, tally = make(), _Tally()
    ends: list[int] = []  # the steps at which running requests end
    now_s, step, coming = 0.0, 0, 0
    while coming < len(asked) or len(queue) or ends:
        if not len(queue) and not ends:
            now_s = max(now_s, asked[coming].arrived_s)
        while coming < len(asked) and asked[coming].arrived_s <= now_s:
            queue.add(asked[coming])
            coming += 1
        view = EngineView(prefill_tokens_per_s=model.prefill_tokens_per_s, running=len(ends), step_s=model.decode_s)
        tokens = 0
        started: list[WaitingRequest] = []
        for request in queue.peek(model.slots - len(ends), now_s, view):
            if started and tokens + request.prefill_tokens > model.step_tokens:
                break
            queue.start(request.request_id, now_s)
            tokens += request.prefill_tokens
            started.append(request)
        now_s += tokens / model.prefill_tokens_per_s + model.decode_s
        step += 1
        for request in started:
            heapq.heappush(ends, step + request.output_tokens - 1)
            _note(tally, request, now_s)
        while ends and ends[0] <= step:
            heapq.heappop(ends)
    waits = sorted(tally.waits_s)
    high = sorted(tally.high_s) or [0.0]
    return Served(
        strategy=queue.name,
        workload=workload,
        requests=len(asked),
        wait_p50_s=waits[len(waits) // 2],
        wait_p99_s=waits[len(waits) * 99 // 100],
        wait_max_s=waits[-1],
        high_wait_p99_s=high[len(high) * 99 // 100],
        in_time_percent=100 * sum(map(sum, tally.in_time.values())) / len(asked),
        tokens_per_s=sum(each.prefill_tokens + each.output_tokens for each in asked) / now_s,
        fairness=jain_index(sum(each) / len(each) for each in tally.in_time.values()),
    )


def _note(tally: _Tally, request: WaitingRequest, now_s: float) -> None:
    wait_s = now_s - request.arrived_s
    tally.waits_s.append(wait_s)
    if request.priority > 0:
        tally.high_s.append(wait_s)
    in_time = request.deadline_s is None or now_s <= request.deadline_s
    tally.in_time.setdefault(request.tenant, []).append(in_time)
