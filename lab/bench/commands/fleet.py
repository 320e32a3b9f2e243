"""``kvgate bench fleet``: a large simulated fleet, measured; or with ``--study`` several small ones, compared."""

from pathlib import Path
from typing import Annotated

import typer

from engines.sim.profile import load_profile
from kvgate.failure import CommandError
from kvgate.renamed import renamed
from lab.bench.options import AsJson, AsMarkdown, say
from lab.report import Host, Report
from lab.show import show
from lab.simulate.limits import MOST_COPIES, MOST_INSTANCES
from lab.simulate.tier_size import times_hbm


@renamed({"--router": "--routing"})
def run_fleet(  # noqa: PLR0913 - each is one option
    *,
    instances: Annotated[int, typer.Option(min=1, max=MOST_INSTANCES, help="Simulated engines.")] = 512,
    copies: Annotated[
        int, typer.Option(min=1, max=MOST_COPIES, help="So many of the conversation trace side by side.")
    ] = 8,
    routing: Annotated[str, typer.Option(help="One of those that kvgate simulate has.")] = "cost_aware",
    profile: Annotated[str, typer.Option(help="Kind of engine, as kvgate simulate has them.")] = "h100-7b",
    ddr: Annotated[str, typer.Option(help="DDR tier of each engine, for example 64GiB; 0: none.")] = "0",
    study: Annotated[
        str | None,
        typer.Option(
            help="Compare instead: tiers (HBM alone, + DDR, + NVMe), or decisions (their cost as the fleet grows)."
        ),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="A folder with mooncake/ and agentic/ traces. Default: that beside a checkout.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few engines, few requests: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """An hour of a large simulated fleet in virtual time: how long does that take, and how much memory?"""
    from lab.bench.fleet import report as fleet
    from lab.bench.pool.report import BESIDE_CHECKOUT
    from lab.simulate.refusals import refusals

    with refusals(traces or BESIDE_CHECKOUT):
        if study is not None:
            report = _studied(study, traces or BESIDE_CHECKOUT, routing, profile, quick=quick)
        else:
            plan = fleet.FleetBench(
                traces=traces,
                instances=instances,
                copies=copies,
                router=routing,
                profile=profile,
                ddr=times_hbm(ddr, "--ddr", load_profile(profile).engine),
                quick=quick,
            )
            report = fleet.run(plan, say)
    show(report, as_json=as_json, as_markdown=as_markdown)


def _studied(name: str, traces: Path, router: str, profile: str, *, quick: bool) -> Report:
    import time

    from lab.bench.fleet.studies import STUDIES, StudyPlan

    if name not in STUDIES:
        raise CommandError(f"--study: unknown study {name!r}; known: {', '.join(STUDIES)}")
    began_s = time.perf_counter()
    grid = STUDIES[name](StudyPlan(traces=traces, router=router, profile=load_profile(profile), quick=quick))
    metrics = {"fleets_count": len(grid.rows), "real_s": time.perf_counter() - began_s}
    return Report(bench=f"fleet {name}", host=Host.here(), metrics=metrics, grids=(grid,))
