"""``kvgate plan TRACE``: how many instances, with which tiers, policy and routing, serve a trace well enough."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from engines.sim.profile import MOST_BATCH, MOST_BLOCKS, EngineShape, load_profile, shipped
from gateway.routing import POLICIES as ROUTING
from kvcontrol.kv_policy import DEFAULT_POLICY
from kvcontrol.kv_policy import POLICIES as EVICTION
from kvgate.display import errors, show_failure
from kvgate.engine.tier_flags import NONE
from kvgate.engine.units import parse_bytes
from kvgate.failure import CommandError
from kvgate.renamed import renamed
from lab.show import show
from lab.simulate.limits import LEAST_SPEED, MOST_CHECK_S, MOST_COPIES, MOST_INSTANCES, MOST_SEEDS, MOST_SPEED, MOST_USD

_CANDIDATES: Final = "What is tried"
_LOAD: Final = "The load"
_MONEY: Final = "Prices: assumptions, say yours"
_CHECK: Final = "Checking"
"""Panels of the help."""


@renamed({"--policies": "--policy", "--rate-scale": "--speed", "--limit-requests": "--limit"})
def plan(  # noqa: PLR0913 - each is one option
    trace: Annotated[
        Path, typer.Argument(help="A trace in Mooncake's, the agentic or Azure's format, plain or gzipped.")
    ],
    *,
    slo: Annotated[str, typer.Option(help="Goals: percentiles of first tokens and of pauses between tokens.")],
    attainment: Annotated[
        float, typer.Option(help="Share of requests to be answered; the percentile of goals that name none.")
    ] = 0.99,
    profile: Annotated[str, typer.Option(help=f"Kind of engine: {', '.join(shipped())}, or a file.")] = "h100-7b",
    max_instances: Annotated[
        int, typer.Option(min=1, max=MOST_INSTANCES, help="The largest fleet.", rich_help_panel=_CANDIDATES)
    ] = 64,
    ddr: Annotated[
        str, typer.Option(help="DDR of an instance, with commas: 0,64GiB.", rich_help_panel=_CANDIDATES)
    ] = "0,64GiB",
    nvme: Annotated[
        str, typer.Option(help="NVMe of an instance, with commas; with DDR alone.", rich_help_panel=_CANDIDATES)
    ] = "0",
    policy: Annotated[
        str, typer.Option(help="What chooses who leaves HBM and tiers, with commas.", rich_help_panel=_CANDIDATES)
    ] = DEFAULT_POLICY,
    routing: Annotated[
        str, typer.Option(help=f"Routing policies: {', '.join(ROUTING)}.", rich_help_panel=_CANDIDATES)
    ] = "cost_aware",
    max_batch: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_BATCH,
            help="Requests that an instance runs at once; 0: the profile's.",
            rich_help_panel=_CANDIDATES,
        ),
    ] = 0,
    speed: Annotated[
        float,
        typer.Option(
            min=LEAST_SPEED, max=MOST_SPEED, help="Requests come so many times as fast.", rich_help_panel=_LOAD
        ),
    ] = 1.0,
    copies: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_COPIES, help="So many of the trace side by side, other tenants'.", rich_help_panel=_LOAD
        ),
    ] = 1,
    limit: Annotated[
        int, typer.Option(min=0, help="Only the first requests of the trace; 0: all.", rich_help_panel=_LOAD)
    ] = 0,
    seconds: Annotated[
        float, typer.Option(min=0, help="Only the first seconds of the trace; 0: all.", rich_help_panel=_LOAD)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Another seed, another jitter.", rich_help_panel=_LOAD)] = 0,
    jitter: Annotated[float, typer.Option(min=0, max=1, help="Spread of steps' times.", rich_help_panel=_LOAD)] = 0.0,
    seeds: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_SEEDS,
            help="Seeds of jitter that size the cheapest fleet again: how sure is its size? 0: none.",
            rich_help_panel=_CHECK,
        ),
    ] = 3,
    instance_cost: Annotated[
        float, typer.Option(min=0, max=MOST_USD, help="Dollars an hour of an instance.", rich_help_panel=_MONEY)
    ] = 2.5,
    ddr_cost_per_gib: Annotated[
        float, typer.Option(min=0, max=MOST_USD, help="Dollars an hour of a GiB of DDR.", rich_help_panel=_MONEY)
    ] = 0.003,
    nvme_cost_per_gib: Annotated[
        float, typer.Option(min=0, max=MOST_USD, help="Dollars an hour of a GiB of NVMe.", rich_help_panel=_MONEY)
    ] = 0.0001,
    check: Annotated[
        bool,
        typer.Option("--check", help="Run a part of the fleet live, beside its prediction.", rich_help_panel=_CHECK),
    ] = False,
    check_seconds: Annotated[
        float, typer.Option(min=1, max=MOST_CHECK_S, help="Requests are sent for so long.", rich_help_panel=_CHECK)
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Find the smallest simulated fleet that keeps an SLO, for each kind of instance, and the cheapest of them.

    kvgate plan TRACE --slo "ttft_p99=2s,itl_p99=50ms" --ddr 0,64GiB,256GiB --policy lru,adaptive

    Fleets are hybrid: prefill and decode on instances of their own are not simulated. Exit code 1 when no fleet is
    enough.
    """
    from lab.plan.planned import checked, planned
    from lab.plan.sizing import Prices, Sizing, kinds
    from lab.plan.slo import Slo
    from lab.simulate.board import FleetBoard
    from lab.simulate.refusals import refusals
    from lab.simulate.study import Study

    if as_json and as_markdown:
        raise CommandError("--json and --markdown: give one of them")
    board = FleetBoard()
    with refusals(trace):
        goals = Slo.parse(slo, attainment)
        study = Study(
            trace=trace,
            profile=load_profile(profile),
            instances=1,
            routers=_names(routing, "--routing", tuple(ROUTING)),
            copies=copies,
            speed=speed,
            limit=limit,
            seconds=seconds,
            seed=seed,
            jitter=jitter,
            max_batch=max_batch,
        )
        prices = Prices(instance=instance_cost, ddr_gib=ddr_cost_per_gib, nvme_gib=nvme_cost_per_gib)
        candidates = kinds(
            _sizes(ddr, "--ddr", study.profile.engine),
            _sizes(nvme, "--nvme", study.profile.engine),
            _names(policy, "--policy", tuple(EVICTION)),
            study.routers,
        )
        if not candidates:
            raise CommandError("--nvme needs DDR, and --ddr has none", "say --ddr 64GiB too, or --nvme 0")
        sizing = Sizing(study, goals, prices, most=max_instances, shown=board.shown)
        for kind in candidates:
            sizing.study_of(kind, max_instances)  # refuses a fleet that is too large before any is simulated
    made = planned(sizing, candidates, profile=profile, seeds=seeds)
    if check and made.chosen is not None:
        try:
            made = checked(made, sizing, profile=profile, seconds=check_seconds, board=board)
        except (CommandError, KeyboardInterrupt) as error:  # the plan stands without it
            why = error.message if isinstance(error, CommandError) else "interrupted"
            show(
                replace(made.report, not_run={**made.report.not_run, "check": why}),
                as_json=as_json,
                as_markdown=as_markdown,
            )
            if not isinstance(error, CommandError):
                errors.print("  the check was interrupted; the plan is whole", markup=False, soft_wrap=True)
            raise
    show(made.report, as_json=as_json, as_markdown=as_markdown)
    if made.chosen is None:
        show_failure(made.refusal)
        raise typer.Exit(1)


def _sizes(text: str, option: str, shape: EngineShape) -> list[int]:
    """Read ``0,64GiB``; 0 and none stand for no such tier. Raises ``CommandError``, also for more blocks than any
    simulated tier has.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise CommandError(f"{option} names no size", f"say one like {option} 64GiB, or {option} 0 for none")
    sizes = [0 if part.lower() in {"0", NONE} else parse_bytes(part, option=option) for part in parts]
    most = MOST_BLOCKS * shape.block_bytes
    for part, size in zip(parts, sizes, strict=True):
        if size > most:
            raise CommandError(f"{option}: {part} is too much; at most {most // 2**30:,} GiB with this profile")
    return sizes


def _names(text: str, option: str, there: tuple[str, ...]) -> tuple[str, ...]:
    """Read names with commas between them; raises ``CommandError``."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in there:
            raise CommandError(f"{option}: there is no {name!r}: there are {', '.join(there)}")
    if not names:
        raise CommandError(f"{option} names none", f"there are {', '.join(there)}")
    return names
