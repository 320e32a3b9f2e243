"""Replays one trace for several policies and capacities, side by side on all cores."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from kvcontrol.core.shown import shown
from kvcontrol.kv_policy.allowed import PolicyError, check_capacity
from kvcontrol.kv_policy.registry import POLICIES
from kvcontrol.kv_policy.spec import PolicySpec
from lab.replay.belady import replay_min
from lab.replay.hits import HitRates
from lab.replay.policy import replay
from lab.traces import Request, read_by_time, read_trace

MIN: Final = "min"
"""The name of Belady's bound among policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What to replay, in at most ``jobs`` processes. ``by_time``: requests ordered by time, not as in the file. Of a
    trace whose requests have more than ``most_accesses`` blocks in all, the beginning is replayed; 0: all.
    """

    trace: Path
    policies: Sequence[PolicySpec]
    capacities: Sequence[int]
    by_time: bool = False
    most_accesses: int = 0
    jobs: int = 1

    def check(self) -> None:
        """Raise ``PolicyError`` for a policy, parameter or capacity that there isn't."""
        if not self.capacities:
            raise PolicyError("no capacity is named")
        for choice in self.policies:
            if choice.name == MIN:
                if choice.parameters:
                    raise PolicyError(f"policy {MIN} has no parameters")
            elif choice.name not in POLICIES:
                raise PolicyError(f"unknown policy {shown(choice.name)}; known: {', '.join([*POLICIES, MIN])}")
            for capacity in self.capacities:
                check_capacity(capacity)
                if choice.name != MIN:
                    choice.make(capacity_blocks=capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One policy at one capacity."""

    policy: str
    capacity_blocks: int
    rates: HitRates


def read(sweep: Sweep) -> list[Request]:
    """Return the sweep's requests in their order; raises ``TraceError``, ``OSError``."""
    requests = read_by_time(sweep.trace) if sweep.by_time else list(read_trace(sweep.trace))
    return list(_beginning(requests, sweep.most_accesses)) if sweep.most_accesses else requests


def _beginning(requests: Iterable[Request], most_accesses: int) -> Iterator[Request]:
    """Yield the first requests that have so many blocks in all, the first one in any case."""
    accesses = 0
    for number, each in enumerate(requests):
        accesses += len(each.block_ids)
        if number and accesses > most_accesses:
            return
        yield each


def run(sweep: Sweep, requests: Sequence[Request], done: Callable[[str], None]) -> list[SweepRow]:
    """Replay every policy at every capacity, and tell ``done`` after each; rows come policy by policy as named.

    Raises ``PolicyError`` before anything starts. Other processes read the trace on their own and end with this call.
    """
    sweep.check()
    wanted = [(choice, capacity) for choice in sweep.policies for capacity in sweep.capacities]
    jobs = min(sweep.jobs, len(wanted))
    found: dict[int, HitRates] = {}
    if jobs <= 1:
        for place, (choice, capacity) in enumerate(wanted):
            found[place] = _replay(requests, choice, capacity)
            done(f"{choice.text} at {capacity}")
    else:
        context = multiprocessing.get_context("spawn")
        stopped, stop = context.Pipe(duplex=False)
        with (
            stopped,
            stop,
            ProcessPoolExecutor(jobs, mp_context=context, initializer=_Worker.begin, initargs=(sweep, stopped)) as pool,
        ):
            places = {
                pool.submit(_Worker.replay, choice, capacity): place for place, (choice, capacity) in enumerate(wanted)
            }
            try:
                for future in as_completed(places):
                    place = places[future]
                    found[place] = future.result()
                    choice, capacity = wanted[place]
                    done(f"{choice.text} at {capacity}")
            except BaseException:
                stop.close()  # they end now, not with what they replay
                pool.shutdown(cancel_futures=True)
                raise
    return [
        SweepRow(policy=choice.text, capacity_blocks=capacity, rates=found[place])
        for place, (choice, capacity) in enumerate(wanted)
    ]


class _Worker:
    """What a process of the pool has read."""

    requests: Sequence[Request] = ()

    @classmethod
    def begin(cls, sweep: Sweep, stopped: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
        threading.Thread(target=_end_when, args=(stopped,), daemon=True).start()
        cls.requests = read(sweep)

    @classmethod
    def replay(cls, choice: PolicySpec, capacity: int) -> HitRates:
        return _replay(cls.requests, choice, capacity)


def _end_when(stopped: Connection) -> None:
    """End this process when the other end of ``stopped`` is closed: by the parent, or because that was killed."""
    stopped.poll(None)
    os._exit(1)


def _replay(requests: Sequence[Request], choice: PolicySpec, capacity: int) -> HitRates:
    if choice.name == MIN:
        return replay_min(requests, capacity_blocks=capacity)
    return replay(requests, choice.make(capacity_blocks=capacity), capacity_blocks=capacity)
