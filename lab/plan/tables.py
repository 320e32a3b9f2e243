"""A capacity plan as tables: the smallest fleet of each kind, the frontier, what to run, and what was assumed."""

import shlex
from collections.abc import Mapping, Sequence
from math import isinf
from typing import Final

from kvcontrol.kv_policy import DEFAULT_POLICY
from kvgate.up.stack import MAX_INSTANCES
from lab.plan.sizing import GIB, Kind, Sized, Sureness, Trial
from lab.report import Cell, Grid
from lab.simulate.study import Study
from lab.simulate.tier_size import size_of

MODEL_FOLDER: Final = "MODEL-FOLDER"
_FLEET: Final = (
    "instances",
    "ddr_gib",
    "nvme_gib",
    "policy",
    "routing",
    "usd_per_hour",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_p99_ms",
    "hit_ratio",
    "requests_by_instance",
    "busy_ratio",
    "shed_ratio",
    "refused_ratio",
    "preemptions",
)


def plan_grids(
    sized: Sequence[Sized], best: Sequence[Trial], chosen: Trial | None, sure: Sureness | None
) -> tuple[Grid, ...]:
    """Return the table of all kinds, that of the frontier where there is one, and that of other seeds."""
    kinds = Grid(
        name="smallest fleets",
        columns=(*_FLEET, "note"),
        rows=tuple((*_row(each.least or each.nearest), _note(each, chosen, sure)) for each in sized),
    )
    grids = [kinds]
    if best:
        grids.append(Grid(name="frontier", columns=_FLEET, rows=tuple(_row(each) for each in best)))
    if sure is not None:
        rows = tuple((instances, kept, tried) for instances, (kept, tried) in sure.tried.items())
        grids.append(Grid(name="other seeds", columns=("instances", "seeds_that_keep_the_goals", "seeds"), rows=rows))
    return tuple(grids)


def nearest(sized: Sequence[Sized]) -> Trial:
    """Return the fleet that misses its goals by the smallest factor."""
    return min((each.nearest for each in sized), key=lambda each: (each.worst, each.usd_per_hour))


def _row(trial: Trial) -> tuple[Cell, ...]:
    kind, outcome = trial.kind, trial.outcome
    usual_s, slow_s = (outcome.ttft_of_answerable(share) for share in (0.5, 0.99))
    return (
        trial.instances,
        kind.ddr_bytes / GIB,
        kind.nvme_bytes / GIB,
        kind.policy,
        kind.routing,
        trial.usd_per_hour,
        None if isinf(usual_s) else usual_s,
        None if isinf(slow_s) else slow_s,
        outcome.itl_ms(0.99),
        outcome.hit_rate,
        outcome.placed,
        outcome.busy,
        outcome.shed_rate,
        outcome.refused_rate,
        outcome.preemptions,
    )


def _note(sized: Sized, chosen: Trial | None, sure: Sureness | None) -> str:
    shown = sized.least or sized.nearest
    outcome, notes = shown.outcome, []
    if sized.least is None:
        notes.append("misses: " + ", ".join(each.words for each in sized.nearest.shortfalls))
    if sized.exceptions:
        fewer = ", ".join(str(each) for each in sized.exceptions)
        notes.append(f"not monotonic: {fewer} kept the goals too, and a larger fleet didn't")
    if sure is not None and sized.least is chosen is not None:
        notes.append(sure.words(chosen.instances))
    if outcome.refused:
        notes.append(
            f"{outcome.refused_rate:.1%} of the requests are longer than the profile allows: refused, and in no goal"
        )
    if outcome.shed:
        notes.append(f"{outcome.shed_rate:.1%} of the requests are shed, and count as waiting for ever")
    if outcome.preemptions:
        notes.append(f"{outcome.preemptions} answers were preempted for lack of blocks, and paused")
    return "; ".join(notes)


def command_grid(trial: Trial, study: Study, profile: str) -> Grid:
    """Return what to run: the engines and the gateway, and the same fleet in virtual time."""
    virtual = _line(["kvgate", "simulate", str(study.trace), *_options(_simulated(trial, study, profile))])
    rows = (*_real(trial, study.max_batch), ("in virtual time", virtual))
    return Grid(name="to run it", columns=("what", "command"), rows=rows)


def _simulated(trial: Trial, study: Study, profile: str) -> dict[str, str]:
    """The options of ``kvgate simulate``, those that aren't its defaults."""
    wanted = {
        "--profile": profile,
        "--instances": str(trial.instances),
        "--routing": trial.kind.routing,
        "--policy": trial.kind.policy,
    }
    more = {
        "--copies": (study.copies, 1),
        "--speed": (study.speed, 1.0),
        "--limit": (study.limit, 0),
        "--seconds": (study.seconds, 0.0),
        "--seed": (study.seed, 0),
        "--jitter": (study.jitter, 0.0),
        "--max-batch": (study.max_batch, 0),
    }
    shape = study.profile.engine
    tiers = {"--ddr": study.ddr, "--nvme": study.nvme}
    return (
        wanted
        | {name: repr(value) for name, (value, default) in more.items() if value != default}
        | {name: size_of(times, shape) for name, times in tiers.items() if times}
    )


def _real(trial: Trial, max_batch: int) -> list[tuple[str, str]]:
    kind = trial.kind
    engine = {"--model": MODEL_FOLDER, **tier_flags(kind)}
    if max_batch:
        engine["--max-batch-size"] = str(max_batch)
    there = (("HBM", 1), ("DDR", kind.ddr_bytes), ("NVME", kind.nvme_bytes))
    policies = {
        f"KVGATE_ENGINE_{tier}_POLICY": kind.policy for tier, size in there if size and kind.policy != DEFAULT_POLICY
    }
    if trial.instances <= MAX_INSTANCES:
        up = {"--instances": str(trial.instances), **engine, "--routing": kind.routing}
        return [("on one machine", _line(["kvgate", "up", *_options(up)], policies))]
    many = f"each of the {trial.instances} engines"
    return [
        (many, _line(["kvgate", "engine", *_options(engine | {"--port": "9001"})], policies)),
        ("the gateway before them", _line(["kvgate", "gateway"], {"KVGATE_ROUTING_POLICY": kind.routing})),
    ]


def tier_flags(kind: Kind) -> dict[str, str]:
    """Return a kind's tiers as the options of ``kvgate up``."""
    sizes = {"--ddr": kind.ddr_bytes, "--nvme": kind.nvme_bytes}
    return {name: f"{size / GIB:.10g}GiB" for name, size in sizes.items() if size}


def _options(options: Mapping[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


def _line(words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()), shlex.join(words)]
    )
