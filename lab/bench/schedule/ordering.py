"""What a step costs with many requests waiting: some come, a client leaves, the engine looks at the front and starts
what fits.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcontrol.scheduler_ir.strategies import EngineView, WaitingId, WaitingQueue, WaitingRequest

LOOKED_AT = 32
"""Requests that an engine looks at in one step; it starts the first few."""
STARTED = 4
_STEP_S = 0.02
_VIEW = EngineView(prefill_tokens_per_s=20_000.0, running=64, step_s=_STEP_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTimes:
    """One strategy with so many waiting: the processor time of a step, so that a busy machine doesn't count."""

    strategy: str
    waiting: int
    steps: int
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float


def arrivals(seed: int = 0) -> Iterator[WaitingRequest]:
    """Give requests for ever, two hundred a second: four tenants, three classes and adapters, sixty-four prefixes."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    now_s, number = 0.0, 0
    while True:
        now_s += rng.expovariate(STARTED / _STEP_S)
        number += 1
        yield WaitingRequest(
            request_id=WaitingId(f"r{number}"),
            arrived_s=now_s,
            prefill_tokens=1 + int(2_000 * rng.lognormvariate(0, 1.2)),
            output_tokens=1 + int(200 * rng.lognormvariate(0, 0.8)),
            priority=rng.choice((-1, 0, 0, 0, 1)),
            deadline_s=now_s + rng.choice((2.0, 10.0, 60.0)),
            tenant=f"t{rng.randrange(4)}",
            model=rng.choice(("", "a", "b")),
            prefix=rng.randrange(64),
        )


def measure(make: Callable[[], WaitingQueue], *, waiting: int, steps: int, seed: int = 0) -> OrderTimes:
    """Time ``steps`` steps with ``waiting`` requests in the queue at each."""
    queue, coming = make(), arrivals(seed)
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    ids: list[WaitingId] = []
    for number in range(waiting):
        request = next(coming)
        queue.add(request)
        ids.append(request.request_id)
        if number % STARTED == 0:  # the engine looks at each step, also while all that it can run does
            queue.peek(LOOKED_AT, request.arrived_s, _VIEW)
    now_s = request.arrived_s
    took_s = []
    for _ in range(steps):
        news = [next(coming) for _ in range(STARTED + 1)]
        now_s = max(now_s + _STEP_S, news[-1].arrived_s)
        leaver = _waiting(queue, ids, rng)
        begin_s = time.thread_time()
        for request in news:
            queue.add(request)
        queue.remove(leaver)
        for request in queue.peek(LOOKED_AT, now_s, _VIEW)[:STARTED]:
            queue.start(request.request_id, now_s)
        took_s.append(time.thread_time() - begin_s)
        ids += [request.request_id for request in news]
    took_s.sort()
    return OrderTimes(
        strategy=queue.name,
        waiting=waiting,
        steps=steps,
        p50_us=took_s[steps // 2] * 1e6,
        p90_us=took_s[steps * 9 // 10] * 1e6,
        p99_us=took_s[steps * 99 // 100] * 1e6,
        max_us=took_s[-1] * 1e6,
    )


def _waiting(queue: WaitingQueue, ids: list[WaitingId], rng: random.Random) -> WaitingId:
    """One of those that wait, at random; those that don't any more are dropped on the way."""
    while True:
        place = rng.randrange(len(ids))
        ids[place], ids[-1] = ids[-1], ids[place]
        found = ids.pop()
        if found in queue:
            return found
