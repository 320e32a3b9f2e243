"""``kvgate simulate TRACE``: a fleet of simulated engines behind the gateway's own routing, in virtual time."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from engines.sim.pacing import AT_ONCE
from engines.sim.profile import MOST_BATCH, MOST_BLOCKS, load_profile, shipped
from kvcontrol.scheduler_ir.pacing import PACES
from kvgate.failure import CommandError
from kvgate.renamed import renamed
from lab.report import Host, Report
from lab.show import show
from lab.simulate.limits import (
    LEAST_SPEED,
    MOST_CHECK_S,
    MOST_COPIES,
    MOST_INSTANCES,
    MOST_SPEED,
    MOST_USERS,
)
from lab.simulate.tier_size import times_hbm


@renamed({"--router": "--routing"})
def simulate(  # noqa: PLR0913 - each is one option
    trace: Annotated[
        Path, typer.Argument(help="A trace in Mooncake's, the agentic or Azure's format, plain or gzipped.")
    ],
    *,
    instances: Annotated[int, typer.Option(min=1, max=MOST_INSTANCES, help="Engines in the fleet.")] = 8,
    routing: Annotated[
        str, typer.Option(help="Routing policies, ours or others' formulas, with commas between them; all: every one.")
    ] = "cost_aware",
    profile: Annotated[str, typer.Option(help=f"Kind of engine: {', '.join(shipped())}, or a file.")] = "h100-7b",
    copies: Annotated[
        int, typer.Option(min=1, max=MOST_COPIES, help="So many of the trace side by side, each other tenants'.")
    ] = 1,
    speed: Annotated[
        float, typer.Option(min=LEAST_SPEED, max=MOST_SPEED, help="Requests come so many times as fast.")
    ] = 1.0,
    limit: Annotated[int, typer.Option(min=0, help="Use the first requests of the trace only; 0: all.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Use the first seconds of the trace only; 0: all.")] = 0.0,
    ddr: Annotated[str, typer.Option(help="DDR tier of each engine, for example 64GiB; 0: none.")] = "0",
    nvme: Annotated[str, typer.Option(help="NVMe tier of each engine, for example 1TiB; 0: none.")] = "0",
    policy: Annotated[str, typer.Option(help="What chooses who leaves HBM and tiers. Default: the profile's.")] = "",
    users: Annotated[
        int,
        typer.Option(min=0, max=MOST_USERS, help="Closed loop: users who wait for answers; 0: trace's times."),
    ] = 0,
    duration: Annotated[
        float,
        typer.Option(min=0, max=MOST_CHECK_S, help="With --users: seconds in which requests are sent; 0: all."),
    ] = 0.0,
    max_batch: Annotated[
        int, typer.Option(min=0, max=MOST_BATCH, help="Requests that an engine runs at once; 0: the profile's.")
    ] = 0,
    kv_blocks: Annotated[
        int, typer.Option(min=0, max=MOST_BLOCKS, help="KV blocks of an engine's HBM; 0: the profile's.")
    ] = 0,
    pace: Annotated[
        str, typer.Option(help=f"{', '.join((AT_ONCE, *PACES))}, with parameters in brackets. Default: the profile's.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Another seed, another jitter.")] = 0,
    jitter: Annotated[float, typer.Option(min=0, max=1, help="Spread of steps' times.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Serve a trace with a simulated fleet: times to the first token, hits, hot spots and shed requests.

    Ctrl-C ends it with the routers that are done (exit code 130).
    """
    from lab.simulate.board import FleetBoard
    from lab.simulate.outcome import FleetOutcome
    from lab.simulate.refusals import refusals
    from lab.simulate.study import ROUTERS, Study, grids, not_known

    if as_json and as_markdown:
        raise CommandError("--json and --markdown: give one of them")
    if duration and not users:
        raise CommandError("--duration is of --users", "--seconds uses the first seconds of the trace alone")
    if users and speed != 1.0:
        raise CommandError("--speed is of the trace's times, and --users send when they have their answers")
    names = tuple(ROUTERS) if routing == "all" else tuple(name.strip() for name in routing.split(",") if name.strip())
    with refusals(trace):
        kind = load_profile(profile)
        shape = replace(kind.engine, hbm_blocks=kv_blocks or kind.engine.hbm_blocks)
        study = Study(
            trace=trace,
            profile=kind,
            instances=instances,
            routers=names,
            copies=copies,
            speed=speed,
            limit=limit,
            seconds=seconds,
            ddr=times_hbm(ddr, "--ddr", shape),
            nvme=times_hbm(nvme, "--nvme", shape),
            policy=policy,
            seed=seed,
            jitter=jitter,
            users=users,
            duration=duration,
            max_batch=max_batch,
            kv_blocks=kv_blocks,
            pace=pace,
        )
        workload = study.workload()
    outcomes: dict[str, FleetOutcome] = {}
    board, took_s = FleetBoard(), 0.0
    try:
        for name in names:
            began_s = time.perf_counter()
            with board.shown(name, workload.spans_s) as progress:
                outcomes[name] = study.run(name, workload, progress)
            took_s += time.perf_counter() - began_s
    except KeyboardInterrupt:
        if not outcomes:
            raise
    last = list(outcomes.values())[-1]
    missing = [name for name in names if name not in outcomes]
    metrics = {
        "instances_count": instances,
        "requests_count": last.requests,
        "virtual_s": last.lasts_s,
        "real_s": took_s,
        "ceiling_ratio": last.ceiling_tokens / max(1, last.prompt_tokens if users else workload.ceiling_tokens()[0]),
    }
    report = Report(bench="simulate", host=Host.here(), metrics=metrics, grids=grids(outcomes))
    show(
        replace(report, not_run=not_known(workload, study) | dict.fromkeys(missing, "interrupted")),
        as_json=as_json,
        as_markdown=as_markdown,
    )
    if missing:
        raise KeyboardInterrupt
