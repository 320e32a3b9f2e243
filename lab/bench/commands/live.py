"""``kvgate bench live``: do simulated fleets do what live ones do?"""

from pathlib import Path
from typing import Annotated

import typer

from engines.sim.profile import shipped
from kvgate.failure import CommandError
from kvgate.renamed import renamed
from kvgate.up.stack import MAX_INSTANCES, Routing
from lab.bench.options import AsJson, AsMarkdown, say
from lab.show import show
from lab.simulate.limits import MOST_INSTANCES


@renamed({"--router": "--routing"})
def run_live(  # noqa: PLR0913 - each is one option
    *,
    trace: Annotated[
        Path | None, typer.Option(help="A trace. Default: the conversation trace in the folder beside a checkout.")
    ] = None,
    instances: Annotated[int, typer.Option(min=1, max=MAX_INSTANCES, help="Simulated engines, each a process.")] = 4,
    of: Annotated[
        int, typer.Option(min=1, max=MOST_INSTANCES, help="The whole trace is for so many; each gets its part.")
    ] = 8,
    every: Annotated[int, typer.Option(min=1, help="Every so-many-th conversation of the trace; 1: all.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="The first so many requests of those.")] = 32,
    stretch: Annotated[
        float,
        typer.Option(min=1, max=60, help="All times, of engines and between arrivals, are so many times as long."),
    ] = 14.0,
    routing: Annotated[Routing, typer.Option(help="The gateway's routing policy.")] = Routing.COST_AWARE,
    profile: Annotated[str, typer.Option(help=f"Kind of engine: {', '.join(shipped())}, or a file.")] = "h100-7b",
    check: Annotated[bool, typer.Option("--check", help="Exit code 1 when a figure differs by more than 5 %.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """A slice of a trace, live and simulated: does the simulator say what the real gateway and sim engines do?"""
    from lab.bench.fleet import live
    from lab.bench.pool.report import BESIDE_CHECKOUT
    from lab.traces import MOONCAKE

    plan = live.LivePlan(
        trace=BESIDE_CHECKOUT / MOONCAKE if trace is None else trace,
        profile=profile,
        router=routing.value,
        instances=instances,
        of=of,
        every=every,
        requests=requests,
        stretch=stretch,
    )
    if instances > of:
        raise CommandError(f"--instances {instances} is more than --of {of}, for which the whole trace is")
    if not plan.trace.is_file():
        raise CommandError(f"there is no trace {plan.trace}", "name its file with --trace")
    report, beyond = live.run(plan, say)
    show(report, as_json=as_json, as_markdown=as_markdown)
    if check and beyond:
        raise CommandError(f"simulated and live differ by more than {live.AGREED_PCT:g} %: {', '.join(beyond)}")
