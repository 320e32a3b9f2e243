"""``kvgate bench ab``: two settings of a simulated fleet take turns on one trace, and what differs is reported."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from engines.sim.profile import load_profile
from kvgate.failure import CommandError
from lab.bench.ab.compare import FIGURES, Change, Verdict, compare
from lab.bench.ab.settings import study_of
from lab.report import Grid, Host, Report
from lab.simulate.outcome import Served
from lab.simulate.study import Study

NAME: Final = "ab"
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbPlan:
    """``a`` and ``b`` as ``settings.py`` has them; each of ``repeats`` runs of both sides has a seed of its own."""

    trace: Path
    a: str
    b: str
    figure: str = "found_ratio"
    router: str = "cost_aware"
    profile: str = "h100-7b"
    instances: int = 8
    copies: int = 1
    speed: float = 1.0
    limit: int = 0
    repeats: int = 1
    jitter: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.figure not in FIGURES:
            raise CommandError(f"--figure: unknown figure {self.figure!r}; known: {', '.join(FIGURES)}")


def run(plan: AbPlan, say: Progress) -> tuple[Report, Change]:
    """Serve the trace with A and B in turns, ``plan.repeats`` times; returns the report and the change of the figure.

    Raises ``CommandError`` for settings that there aren't, ``ValueError`` and others as ``Study`` does.
    """
    base = Study(
        trace=plan.trace,
        profile=load_profile(plan.profile),
        instances=plan.instances,
        routers=(plan.router,),
        copies=plan.copies,
        speed=plan.speed,
        limit=plan.limit,
        jitter=plan.jitter,
    )
    workload = base.workload()
    size = workload.block_tokens
    sides = {
        "A": study_of(plan.a, base, side="--a", block_tokens=size),
        "B": study_of(plan.b, base, side="--b", block_tokens=size),
    }
    pairs: list[tuple[list[Served], list[Served]]] = []
    answered = dict.fromkeys(sides, 0)
    for repeat in range(plan.repeats):
        served: dict[str, list[Served]] = {}
        for name, study in sides.items():
            say(f"run {repeat + 1} of {plan.repeats}, {name}: {workload.size:,} requests")
            seeded = replace(study, seed=plan.seed + repeat)
            served[name] = list(seeded.run(seeded.routers[0], workload).served)
            answered[name] += len(served[name])
        pairs.append((served["A"], served["B"]))
    changes = compare(pairs, seed=plan.seed)
    return _report(plan, changes, answered, sent=workload.size * plan.repeats), next(
        each for each in changes if each.figure == plan.figure
    )


def verdict_line(plan: AbPlan, change: Change) -> str:
    """Return the comparison in one sentence."""
    shown = f"{change.figure} {change.change:+.1%} (95 % interval {change.low:+.1%} to {change.high:+.1%})"
    match change.verdict:
        case Verdict.TIE:
            return f"no difference is proven between A ({plan.a}) and B ({plan.b}): {shown}"
        case Verdict.BETTER | Verdict.WORSE as verdict:
            return f"B ({plan.b}) is {verdict} than A ({plan.a}): {shown}"


def _report(plan: AbPlan, changes: list[Change], answered: dict[str, int], *, sent: int) -> Report:
    metrics: dict[str, float] = {"requests_count": sent}
    metrics |= {f"answered_{name.lower()}_count": count for name, count in answered.items()}
    for each in changes:
        metrics |= {
            f"{each.figure}_change_ratio": each.change,
            f"{each.figure}_change_low_ratio": each.low,
            f"{each.figure}_change_high_ratio": each.high,
        }
    rows = tuple((each.figure, each.a, each.b, each.change, each.low, each.high, each.verdict) for each in changes)
    columns = ("figure", "a", "b", "change", "low", "high", "b_is")
    settings = Grid(name="settings", columns=("side", "settings"), rows=(("A", plan.a), ("B", plan.b)))
    return Report(
        bench=NAME,
        host=Host.here(),
        metrics=metrics,
        grids=(settings, Grid(name="comparison", columns=columns, rows=rows)),
    )
