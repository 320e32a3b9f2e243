"""``kvgate bench evict|adaptive|shadow|hierarchy|predict``: what policies and predictors cost and find."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from kvgate.failure import CommandError
from lab.bench.options import AsJson, AsMarkdown, say
from lab.show import show


def run_evict(
    *,
    policy: Annotated[str | None, typer.Option(help="Which to measure, with commas. Default: all that ship.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure small caches: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Full caches of 10^5 and 10^6 blocks: how long does each eviction policy take to choose who goes?"""
    from lab.bench.policies import evict

    names = None if policy is None else tuple(name.strip() for name in policy.split(",") if name.strip())
    show(evict.run(say, quick=quick, policies=names), as_json=as_json, as_markdown=as_markdown)


def run_adaptive(  # noqa: PLR0913 - each is one option
    *,
    policy: Annotated[str, typer.Option(help="What to hold beside LRU.")] = "adaptive",
    traces: Annotated[
        Path | None,
        typer.Option(help="A folder; all of its *.jsonl(.gz) are replayed. Default: that beside a checkout."),
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Blocks in the cache, like 300,5859. Default: 8 to 50,000.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=0, help="Random workloads of each of three capacities.")] = 10,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two capacities, one seed, beginnings of traces: to see that it runs.")
    ] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Beside LRU, on all traces at all capacities: does the adaptive policy ever find less? Fails where it does."""
    from lab.bench.policies import adaptive
    from lab.bench.pool.report import BESIDE_CHECKOUT
    from lab.replay.command import capacities_of, cores

    plan = adaptive.AdaptivePlan(
        traces=BESIDE_CHECKOUT if traces is None else traces,
        policy=policy,
        capacities=adaptive.CAPACITIES if capacity is None else capacities_of(capacity),
        seeds=seeds,
        jobs=jobs or cores(),
        quick=quick,
    )
    report, failed = adaptive.run(plan, say)
    show(report, as_json=as_json, as_markdown=as_markdown)
    if failed:
        raise CommandError(f"{policy} is behind what is promised: {'; '.join(failed)}")


def run_shadow(
    *,
    policy: Annotated[str, typer.Option(help="Candidates, like lru,mq(lifetime=2).")] = "lru,adaptive,s3fifo,arc,lru2",
    quick: Annotated[bool, typer.Option("--quick", help="Few requests: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Shadow policies beside an engine: what does following its requests cost?"""
    from kvcontrol.kv_policy import PolicyError
    from lab.bench.policies import shadow

    try:
        report = shadow.run(say, candidates=policy, quick=quick)
    except PolicyError as error:
        raise CommandError(str(error)) from error
    show(report, as_json=as_json, as_markdown=as_markdown)


def run_hierarchy(  # noqa: PLR0913 - each is one option
    *,
    policy: Annotated[str, typer.Option(help="Policies of all tiers, with commas; metrics are the first's.")] = "lru",
    traces: Annotated[
        Path | None, typer.Option(help="A folder with mooncake/ and agentic/ traces. Default: that beside a checkout.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="A folder for pictures; needs the extra 'plot'.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Serve few requests: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """Traces through the real tiers, without bytes: what is found in HBM, DDR and NVMe, and what is computed again?"""
    from lab.bench.hierarchy import report as hierarchy

    if plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError("--plot needs matplotlib, which isn't installed", "pip install 'kvgate[plot]'")
        if not plot.is_dir():
            raise CommandError(f"--plot {plot}: no such folder")

    plan = hierarchy.HierarchyPlan(traces=traces, policies=policy, quick=quick, plots=plot)
    show(hierarchy.run(plan, say), as_json=as_json, as_markdown=as_markdown)


def run_predict(
    *,
    predictors: Annotated[
        str, typer.Option(help="Which to run beside the statistical one, with commas.")
    ] = "constant,statistical,lstm,transformer",
    traces: Annotated[
        Path | None,
        typer.Option(help="A folder with azure/, mooncake/ and agentic/ traces. Default: that beside a checkout."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few requests of each trace: to see that it runs.")] = False,
    as_json: AsJson = False,
    as_markdown: AsMarkdown = False,
) -> None:
    """How long answers will be, when chats come back, what to prefetch: predicted on traces, the constant beside."""
    from lab.bench.prediction import report as predict

    names = tuple(name.strip() for name in predictors.split(",") if name.strip())
    report = predict.run(predict.PredictPlan(traces=traces, predictors=names, quick=quick), say)
    show(report, as_json=as_json, as_markdown=as_markdown)
