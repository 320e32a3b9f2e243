"""A capacity plan from its candidates to its report, and held to a live run where that is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvgate.display import errors
from kvgate.failure import CommandError
from lab.plan.sizing import Kind, Sized, Sizing, Trial, cheapest, frontier
from lab.plan.tables import command_grid, nearest, plan_grids
from lab.report import Grid, Host, Report
from lab.simulate.board import FleetBoard
from lab.simulate.study import not_known

_IDLE: Final = 0.3
"""Instances that are less busy than this wouldn't be relieved by others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """``chosen`` is the cheapest fleet that keeps the goals, None where none of up to ``most`` instances does."""

    sized: Sequence[Sized]
    chosen: Trial | None
    report: Report
    goals: str
    most: int
    context_tokens: int

    @property
    def refusal(self) -> CommandError:
        """What there is to say where nothing was chosen: the limit that binds, and what came nearest."""
        near = nearest(self.sized)
        missed = "; ".join(each.words for each in near.shortfalls)
        busy = f"its instances were {near.outcome.busy:.0%} busy"
        if not near.outcome.answerable:
            busy = (
                f"no engine could take any of the requests, each needs more than the profile's context of "
                f"{self.context_tokens:,} tokens or than its HBM: use another profile"
            )
        elif near.outcome.busy < _IDLE:
            busy += ": it is not their number that binds, but how long one of them takes"
        return CommandError(
            f"no fleet of up to {self.most} instances keeps {self.goals}",
            f"nearest came {near.instances} x ({near.kind}): {missed}; {busy}",
        )


def planned(sizing: Sizing, candidates: Sequence[Kind], *, profile: str, seeds: int) -> Planned:
    """Simulate what is needed, and say what came of it. ``profile`` is as it was typed; the cheapest fleet is sized
    again with so many other ``seeds``.
    """
    sized = sizing.size_all(candidates)
    chosen = cheapest(sized)
    sure = None if chosen is None or not seeds else sizing.sureness(chosen, seeds)
    grids = list(plan_grids(sized, frontier(trial for each in sized for trial in each.trials), chosen, sure))
    metrics: dict[str, float] = {
        "requests_count": sizing.workload.size,
        "trace_s": sizing.workload.spans_s,
        "kinds_count": len(candidates),
        "fleets_simulated_count": sum(each.tried for each in sized),
    }
    if chosen is not None:
        metrics |= {"instances_count": chosen.instances, "usd_per_hour": chosen.usd_per_hour}
    if chosen is not None and sure is not None:
        least, most = sure.spread(chosen.instances)
        metrics |= {"instances_least_count": least, "instances_most_count": most}
        metrics["fleets_simulated_count"] += sum(tried for _, tried in sure.tried.values())
    if chosen is not None:
        grids.append(command_grid(chosen, sizing.study_of(chosen.kind, chosen.instances), profile))
    grids.append(_assumptions(sizing))
    unknown = not_known(sizing.workload, sizing.study)
    report = Report(bench="plan", host=Host.here(), metrics=metrics, grids=tuple(grids), not_run=unknown)
    return Planned(
        sized=sized,
        chosen=chosen,
        report=report,
        goals=str(sizing.slo),
        most=sizing.most,
        context_tokens=sizing.study.profile.engine.context_tokens,
    )


def _assumptions(sizing: Sizing) -> Grid:
    prices, workload, profile = sizing.prices, sizing.workload, sizing.study.profile
    load = (
        f"{sizing.slo}; {workload.size:,} requests in {workload.spans_s:,.0f} s, sent when the trace has them, however "
        "late answers are; requests longer than the profile allows are in no goal"
    )
    engines = (
        f"profile {profile.name}: {profile.summary}; hybrid instances without failures, network delays, stale reports "
        "or tenants with quotas"
    )
    dollars = (
        f"dollars an hour: {prices.instance:g} an instance (--instance-cost), {prices.ddr_gib:g} a GiB of DDR "
        f"(--ddr-cost-per-gib), {prices.nvme_gib:g} a GiB of NVMe (--nvme-cost-per-gib)"
    )
    return Grid(
        name="assumed", columns=("what", "value"), rows=(("load", load), ("engines", engines), ("prices", dollars))
    )


def checked(made: Planned, sizing: Sizing, *, profile: str, seconds: float, board: FleetBoard) -> Planned:
    """Return the plan with what a live run of its fleet, or of a part of it, was like. Raises ``CommandError``."""
    from kvgate.engine.model import tiny_model
    from lab.driver.run import say_warnings
    from lab.plan.live import slice_of
    from lab.plan.verdict import goals_grid
    from lab.simulate.live import check_grid, lived, predicted

    chosen = made.chosen
    if chosen is None:
        raise ValueError("there is no fleet to run")
    study = sizing.study_of(chosen.kind, chosen.instances)
    part = slice_of(study, sizing.workload, seconds)
    errors.print(f"  check, live: {part}", markup=False, soft_wrap=True)
    before = predicted(study, chosen.kind.routing, part, board)
    seen = lived(study, chosen.kind.routing, part, tiny_model(console=errors), profile)
    say_warnings(seen.replayed)
    if seen.replayed.interrupted:
        raise KeyboardInterrupt
    grid = check_grid(before, seen)
    report = replace(
        made.report,
        metrics={
            **made.report.metrics,
            "check_instances_count": part.instances,
            "check_fleet_instances_count": part.fleet,
            "check_requests_count": len(part.requests),
        },
        grids=(
            *made.report.grids,
            replace(grid, name=f"check: {part}"),
            goals_grid(sizing.slo, before, seen.replayed.answers),
        ),
    )
    return replace(made, report=report)
