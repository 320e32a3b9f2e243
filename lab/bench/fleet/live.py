"""``kvgate bench live``: a slice of a trace served live in real time, beside the same fleet in virtual time.

The real gateway and simulated engines as processes on 127.0.0.1, asked over HTTP. All times are stretched, those of
the engines and those between arrivals: what gateway, client and network take themselves is then small beside them.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from engines.sim.profile import load_profile
from kvgate.display import errors
from kvgate.engine.model import tiny_model
from kvgate.failure import CommandError
from lab.driver.run import say_warnings
from lab.report import Grid, Host, Report
from lab.simulate.board import FleetBoard
from lab.simulate.busy import Busy
from lab.simulate.live import Slice, check_grid, lived, predicted, within
from lab.simulate.refusals import refusals
from lab.simulate.study import Study
from lab.traces import Request

NAME: Final = "live"
AGREED_PCT: Final = 5.0
"""Figures that differ by no more agree."""
_COMPARED: Final = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "hit_ratio", "answered_requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePlan:
    """``requests`` of every ``every``-th conversation of the trace, at the rate of ``instances`` of the ``of`` that
    serve the whole trace; all times are ``stretch`` times as long. ``profile`` is a name or a file.
    """

    trace: Path
    profile: str
    router: str
    instances: int
    of: int
    every: int
    requests: int
    stretch: float


def run(plan: LivePlan, say: Callable[[str], None]) -> tuple[Report, list[str]]:
    """Simulate the slice, serve it live, and return the report with what differs by more than ``AGREED_PCT``.

    Raises ``CommandError``, and ``KeyboardInterrupt`` when the live run was; no process is left then either.
    """
    with refusals(plan.trace):
        study = Study(
            trace=plan.trace,
            profile=load_profile(plan.profile),
            instances=plan.instances,
            routers=(plan.router,),
            slow=plan.stretch,
        )
        part = slice_of(plan, study)
    what = f"{part}, all times x {plan.stretch:g}"
    before = predicted(study, plan.router, part, FleetBoard())
    say(f"live: {what}")
    seen = lived(study, plan.router, part, tiny_model(console=errors), plan.profile)
    say_warnings(seen.replayed)
    if seen.replayed.interrupted:
        raise KeyboardInterrupt
    figures = _in_percent(check_grid(before, seen))
    off = {str(row[0]): row[3] for row in figures.rows if row[0] in _COMPARED}
    beyond = [
        f"{name} by {'all' if each is None else f'{each:.1f} %'}"
        for name, each in off.items()
        if not isinstance(each, float) or abs(each) > AGREED_PCT
    ]
    metrics = {
        "worst_difference_pct": max((abs(each) for each in off.values() if isinstance(each, float)), default=0.0),
        "requests_count": len(part.requests),
        "instances_count": part.instances,
        "stretch_times": plan.stretch,
        "live_s": seen.replayed.setting.elapsed_s,
    }
    report = Report(
        bench=NAME, host=Host.here(), metrics=metrics, grids=(replace(figures, name=what), _busy_grid(seen.busy))
    )
    return report, beyond


def slice_of(plan: LivePlan, study: Study) -> Slice:
    """Return what of the trace is served, and how fast; raises ``CommandError`` where nothing is, and as reading."""
    workload = study.workload()
    fitting = within(study.profile.engine.context_tokens, workload)
    chosen = list(conversations(fitting, plan.every))[: plan.requests]
    if not chosen:
        raise CommandError("no request of the trace fits the profile's context")
    speed = plan.every * plan.instances / plan.of / plan.stretch
    lasts_s = (chosen[-1].at_s - chosen[0].at_s) / speed
    return Slice(instances=plan.instances, fleet=plan.of, requests=chosen, speed=speed, seconds=round(lasts_s, 1))


def conversations(requests: Sequence[Request], every: int) -> Iterator[Request]:
    """Yield those of every so-many-th conversation: of a session, or with the same first two blocks where the trace has
    no sessions (all prompts of Mooncake's share the first). Without blocks each request is one.
    """
    places: dict[str | bytes | int, int] = {}
    for number, each in enumerate(requests):
        name = each.session or array("q", each.block_ids[:2]).tobytes() or number
        if places.setdefault(name, len(places)) % every == 0:
            yield each


def _in_percent(grid: Grid) -> Grid:
    """Return predictions as what was simulated, and how much more that is than what was seen in percent."""
    return Grid(
        name=grid.name,
        columns=("figure", "simulated", "live", "difference_pct"),
        rows=tuple((*row[:3], 100.0 * row[3] if isinstance(row[3], float) else None) for row in grid.rows),
    )


def _busy_grid(busy: Busy) -> Grid:
    return Grid(
        name="processor time meanwhile",
        columns=("whose", "core_pct"),
        rows=(
            ("the gateway's", 100.0 * busy.gateway),
            ("the engines'", 100.0 * busy.engines),
            ("the client's", 100.0 * busy.client),
            ("others': what disturbs", 100.0 * busy.others),
        ),
    )
