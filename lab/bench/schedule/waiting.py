"""What thousands of waiting requests cost a step of LMDeploy's scheduler: in its own order, and shown a window.

    python -m lab.bench.schedule.waiting --waiting 10000 [--strategy priority] [--own-order]

A real scheduler of a tiny model's engine, whose loop doesn't run: sequences come, LMDeploy looks at what waits as it
does in a step (``has_waiting_long_prefill``, ``schedule``), and those that it chose end. Processor time of the thread.
"""

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 20
BATCH = 32
_COME = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTimes:
    """Microseconds: ``front`` is what showing the window takes (all that wait, in LMDeploy's own order), ``look`` what
    LMDeploy's checks before a prefill take, ``schedule`` choosing a batch; ``add`` is one arrival, on average.
    """

    order: str
    waiting: int
    add_us: float
    front_p50_us: float
    front_p99_us: float
    look_p50_us: float
    look_p99_us: float
    schedule_p50_us: float
    schedule_p99_us: float


def measure(engine: Any, *, waiting: int, steps: int, strategy: str | None) -> WaitingTimes:
    """Time ``steps`` steps; ``strategy`` None is an engine without our hooks."""
    from engines.lmdeploy.schedule.scheduler import queue_of
    from kvcontrol.scheduler_ir.strategies import make_strategy

    scheduler = engine.scheduler
    queue = queue_of(scheduler)
    if strategy is not None:
        assert queue is not None, "the hooks are not installed"  # noqa: S101 - a mistake of the caller
        queue.swap(make_strategy(strategy, {"ageing_bound_s": 86400}))
    line = _Line(scheduler)
    began_s = time.thread_time()
    for _ in range(waiting):
        line.come()
    add_us = (time.thread_time() - began_s) / waiting * 1e6
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(steps):
        for _ in range(_COME):
            line.come()
        chosen: list[Any] = []
        for taken, work in zip(
            times,
            (
                lambda: scheduler.waiting,
                scheduler.has_waiting_long_prefill,
                lambda: chosen.extend(scheduler.schedule(is_prefill=True).running),  # noqa: B023 - called at once
            ),
            strict=True,
        ):
            began_s = time.thread_time()
            work()
            taken.append((time.thread_time() - began_s) * 1e6)
        for seq in chosen:
            scheduler.end_session(seq.session_id)
        while scheduler.num_waiting() < waiting:
            line.come()
    line.end()
    front, look, schedule = (_shares(each) for each in times)
    return WaitingTimes(
        order=strategy or "LMDeploy's own",
        waiting=waiting,
        add_us=round(add_us, 1),
        front_p50_us=front[0],
        front_p99_us=front[1],
        look_p50_us=look[0],
        look_p99_us=look[1],
        schedule_p50_us=schedule[0],
        schedule_p99_us=schedule[1],
    )


class _Line:
    """Sequences that come to a scheduler, the same in every run."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._chooser = random.Random(1)  # noqa: S311 - reproducible
        self._sessions = 0

    def come(self) -> None:
        import numpy as np
        from lmdeploy.pytorch.messages import SamplingParam

        from engines.lmdeploy.schedule.urgency import CARRIED_URGENCY
        from engines.requests.urgency import Urgency
        from kvcontrol.core.priority import Priority

        self._sessions += 1
        param = SamplingParam()
        due_s = self._chooser.choice((None, 5.0, 60.0))
        CARRIED_URGENCY.carry(param, Urgency(priority=self._chooser.choice(list(Priority)), first_token_s=due_s))
        tokens = np.array([self._chooser.randrange(3, 1000) for _ in range(PROMPT_TOKENS)])
        self._scheduler.add_session(self._sessions).add_sequence(tokens, sampling_param=param)

    def end(self) -> None:
        for session in self._scheduler.get_sessions():
            self._scheduler.end_session(session.session_id)


def _shares(taken: list[float]) -> tuple[float, float]:
    taken.sort()
    return round(taken[len(taken) // 2], 1), round(taken[len(taken) * 99 // 100], 1)


def main() -> None:
    """Print one JSON object as the last line; LMDeploy logs before it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--strategy", default="priority")
    parser.add_argument("--own-order", action="store_true", help="without kvgate's hooks")
    said = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from engines.lmdeploy import cpu
    from engines.lmdeploy.hooks import schedule_hooks
    from engines.lmdeploy.patching import install
    from engines.models.tiny import build_tiny

    cpu.activate(cpu.CpuResources(threads=1))
    if not said.own_order:
        install(schedule_hooks())
    from lmdeploy.messages import PytorchEngineConfig
    from lmdeploy.pytorch.engine.engine import Engine

    config = PytorchEngineConfig(
        device_type="cpu", block_size=16, num_gpu_blocks=256, session_len=1024, max_batch_size=BATCH
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.from_pretrained(str(build_tiny(Path(folder) / "tiny")), engine_config=config)
    strategy = None if said.own_order else said.strategy
    times = measure(engine, waiting=said.waiting, steps=said.steps, strategy=strategy)
    engine.close()
    print(json.dumps(asdict(times)))  # noqa: T201


if __name__ == "__main__":
    main()
