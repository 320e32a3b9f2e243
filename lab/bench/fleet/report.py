"""``kvgate bench fleet``: how long an hour of a large fleet takes in virtual time, and how much memory."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engines.sim.profile import load_profile
from kvgate.failure import CommandError
from lab.bench.pool.report import BESIDE_CHECKOUT
from lab.report import Host, Report
from lab.simulate.board import FleetBoard
from lab.simulate.study import Study, grids
from lab.traces import MOONCAKE

NAME: Final = "fleet"
_QUICK_REQUESTS: Final = 100
_HOUR_S: Final = 3600.0
_KIB: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetBench:
    """``quick``: few requests on few instances, to see that it runs."""

    traces: Path | None
    instances: int = 512
    copies: int = 8
    router: str = "cost_aware"
    profile: str = "h100-7b"
    ddr: float = 0.0
    quick: bool = False


def run(plan: FleetBench, say: Callable[[str], None]) -> Report:
    """Serve the conversation trace, which lasts an hour, side by side so many times, and measure this process."""
    trace = (BESIDE_CHECKOUT if plan.traces is None else plan.traces) / MOONCAKE
    if not trace.is_file():
        raise CommandError(f"there is no trace {trace}", "name the folder that holds it with --traces")
    instances = 8 if plan.quick else plan.instances
    study = Study(
        trace=trace,
        profile=load_profile(plan.profile),
        instances=instances,
        routers=(plan.router,),
        copies=plan.copies,
        limit=_QUICK_REQUESTS if plan.quick else 0,
        ddr=plan.ddr,
    )
    workload = study.workload()
    say(f"{instances} instances, {workload.size} requests in {workload.lasts_s:,.0f} s of virtual time")
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    with FleetBoard().shown(plan.router, workload.spans_s) as told:
        outcome = study.run(plan.router, workload, told)
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    hours = round(workload.lasts_s / _HOUR_S)
    name = f"fleet_{instances}x{hours}h_s" if hours else "fleet_quick_s"
    metrics = {
        name: took_s,
        "fleet_cpu_s": took_cpu_s,
        "fleet_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB / 1e9,
        "fleet_request_us": took_s / workload.size * 1e6,
        "fleet_virtual_s": outcome.lasts_s,
        "requests_count": outcome.requests,
        "instances_count": instances,
    }
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=grids({plan.router: outcome}))
