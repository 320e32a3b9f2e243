"""How busy a machine was while a slice was served live, and with what: whether that disturbed the figures."""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Processor time by whom, each in cores in the mean. ``others`` are those who have nothing to do with the run, and
    what the host of a virtual machine keeps.
    """

    gateway: float
    engines: float
    client: float
    others: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Processor time until a moment; the client is this process."""

    gateway_pids: Sequence[int]
    engine_pids: Sequence[int]
    at_s: float
    gateway_s: float
    engines_s: float
    client_s: float
    machine_s: float

    @classmethod
    def now(cls, *, gateway: Iterable[int], engines: Iterable[int]) -> Self:
        """Read the counters of these processes, which run, and of the cores that this one may use."""
        gateway, engines = list(gateway), list(engines)
        return cls(
            gateway_pids=gateway,
            engine_pids=engines,
            at_s=time.monotonic(),
            gateway_s=_processor_s(gateway),
            engines_s=_processor_s(engines),
            client_s=time.process_time(),
            machine_s=_machine_s(),
        )

    def since(self) -> Busy:
        """Return who was how busy from then until now."""
        now = Spent.now(gateway=self.gateway_pids, engines=self.engine_pids)
        lasts_s = max(1e-9, now.at_s - self.at_s)
        gateway = (now.gateway_s - self.gateway_s) / lasts_s
        engines = (now.engines_s - self.engines_s) / lasts_s
        client = (now.client_s - self.client_s) / lasts_s
        others = (now.machine_s - self.machine_s) / lasts_s - gateway - engines - client
        return Busy(gateway=gateway, engines=engines, client=client, others=max(0.0, others))


def _processor_s(pids: Iterable[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def _machine_s() -> float:
    """Return the time in which the cores that this process may use did something."""
    cores = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity"):
        cores = [cores[place] for place in os.sched_getaffinity(0) if place < len(cores)]
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(core, kind, 0.0) for core in cores for kind in kinds)
