"""``kvgate bench pool``: the pool's measurements on real traces' lengths, put into one report."""

from dataclasses import astuple, fields
from pathlib import Path

from kvgate.failure import CommandError
from lab.bench.pool import lengths
from lab.bench.pool import measure as pool
from lab.report import Grid, Host, Report

BESIDE_CHECKOUT = Path(__file__).parents[3].parent / "shared" / "traces"


def workloads(traces: Path | None, say: pool.Progress) -> list[lengths.Workload]:
    """Return the lengths to measure with: of ``traces``, else of the traces beside this checkout, else drawn ones.

    ``CommandError`` names what a given folder lacks.
    """
    if traces is None:
        if not BESIDE_CHECKOUT.is_dir():
            say("no --traces: lengths are drawn from log-normal distributions, of no real service")
            return [lengths.drawn()]
        traces = BESIDE_CHECKOUT
    for file, _ in lengths.TRACES.values():
        if not (traces / file).is_file():
            raise CommandError(f"--traces {traces}: there is no {file}", "name the folder that holds it")
    return lengths.load(traces)


def run(plan: pool.PoolPlan, say: pool.Progress) -> Report:
    """Measure all of the plan."""
    measured = pool.run(plan, say)
    times = Grid(
        name="allocations",
        columns=tuple(field.name for field in fields(pool.AllocationTimes)),
        rows=tuple(astuple(each) for each in measured.allocations),
    )
    return Report(bench=pool.NAME, host=Host.here(), metrics=measured.metrics, grids=(times,))
