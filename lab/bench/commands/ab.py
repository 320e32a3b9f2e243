"""``kvgate bench ab``: is one setting better than another, on the same requests?"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvgate.failure import CommandError
from lab.bench.ab.settings import SETTINGS
from lab.bench.options import AsJson, AsMarkdown, say
from lab.show import show
from lab.simulate.limits import LEAST_SPEED, MOST_COPIES, MOST_SPEED


class Expected(StrEnum):
    """What a comparison must show."""

    BETTER = "better"
    NOT_WORSE = "not_worse"


_EACH = f"Settings of this side, like 'policy=lru ddr=64GiB'. Names: {', '.join(SETTINGS)}."


def run_ab(  # noqa: PLR0913 - each is one option
    *,
    a: Annotated[str, typer.Option("--a", help=_EACH)],
    b: Annotated[str, typer.Option("--b", help="The same of the side that is to be better.")],
    trace: Annotated[Path, typer.Option(help="A trace in Mooncake's or the agentic format, plain or gzipped.")],
    figure: Annotated[
        str, typer.Option(help="Decides: found_ratio, ttft_mean_s, ttft_p50_s, ttft_p90_s or ttft_p99_s.")
    ] = "found_ratio",
    expect: Annotated[
        Expected | None, typer.Option(help="Fail unless B is better, or unless B is not worse, in that figure.")
    ] = None,
    instances: Annotated[int, typer.Option(min=1, help="Engines of both fleets, unless a side sets it.")] = 8,
    copies: Annotated[int, typer.Option(min=1, max=MOST_COPIES, help="So many of the trace side by side.")] = 1,
    speed: Annotated[
        float, typer.Option(min=LEAST_SPEED, max=MOST_SPEED, help="Requests come so many times as fast.")
    ] = 1.0,
    limit: Annotated[int, typer.Option(min=0, help="Use the first requests of the trace only; 0: all.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of both sides, each pair with a seed of its own.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other jitter and other draws.")] = 0,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Two settings of a simulated fleet take turns on a trace: is B better, with which confidence?"""
    from lab.bench.ab.compare import Verdict
    from lab.bench.ab.run import AbPlan, run, verdict_line
    from lab.simulate.refusals import refusals

    plan = AbPlan(
        trace=trace,
        a=a,
        b=b,
        figure=figure,
        instances=instances,
        copies=copies,
        speed=speed,
        limit=limit,
        repeats=repeats,
        seed=seed,
    )
    with refusals(trace):
        report, change = run(plan, say)
    show(report, as_json=as_json, as_markdown=as_markdown)
    said = verdict_line(plan, change)
    say(said)
    met = {
        None: True,
        Expected.BETTER: change.verdict is Verdict.BETTER,
        Expected.NOT_WORSE: change.verdict is not Verdict.WORSE,
    }[expect]
    if not met:
        raise CommandError(f"--expect {expect}: {said}")
