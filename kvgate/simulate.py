"""``kvgate simulate TRACE``: a fleet of simulated engines behind the gateway's own routing, in virtual time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from engines.sim.profile import ProfileError, load_profile, shipped
from kvcontrol.traces import TraceError
from kvgate.benchmarks.report import Host, Report
from kvgate.benchmarks.show import show
from kvgate.display import errors
from kvgate.failure import CommandError

_TELL_S = 5.0


def simulate(  # noqa: PLR0913 - each is one option
    trace: Annotated[Path, typer.Argument(help="A trace in Mooncake's or the agentic format, plain or gzipped.")],
    *,
    instances: Annotated[int, typer.Option(min=1, help="Engines in the fleet.")] = 8,
    router: Annotated[
        str, typer.Option(help="Routing policies, ours or others' formulas, with commas between them; all: every one.")
    ] = "cost_aware",
    profile: Annotated[str, typer.Option(help=f"Kind of engine: {', '.join(shipped())}, or a file.")] = "h100-7b",
    copies: Annotated[int, typer.Option(min=1, help="So many of the trace side by side, each other tenants'.")] = 1,
    speed: Annotated[float, typer.Option(min=0.001, help="Requests come so many times as fast.")] = 1.0,
    limit: Annotated[int, typer.Option(min=0, help="Use the first requests of the trace only; 0: all.")] = 0,
    ddr: Annotated[float, typer.Option(min=0, help="DDR tier, in multiples of HBM; 0: none.")] = 0.0,
    nvme: Annotated[float, typer.Option(min=0, help="NVMe tier, in multiples of HBM; 0: none.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Another seed, another jitter.")] = 0,
    jitter: Annotated[float, typer.Option(min=0, max=1, help="Spread of steps' times.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Serve a trace with a simulated fleet: times to the first token, hits, hot spots and what was turned away."""
    from kvgate.simulation.study import ROUTERS, Study, grids

    if as_json and as_markdown:
        raise CommandError("--json and --markdown: give one of them")
    names = tuple(ROUTERS) if router == "all" else tuple(name.strip() for name in router.split(",") if name.strip())
    with _refusals(trace):
        study = Study(
            trace=trace,
            profile=load_profile(profile),
            instances=instances,
            routers=names,
            copies=copies,
            speed=speed,
            limit=limit,
            ddr=ddr,
            nvme=nvme,
            seed=seed,
            jitter=jitter,
        )
        workload = study.workload()
    outcomes = {}
    took_s = 0.0
    for name in names:
        began_s = time.perf_counter()
        outcomes[name] = study.run(name, workload, _Progress(name, workload.lasts_s + workload.spread_s))
        took_s += time.perf_counter() - began_s
    last = outcomes[names[-1]]
    metrics = {
        "instances_count": instances,
        "requests_count": last.requests,
        "virtual_s": last.lasts_s,
        "real_s": took_s,
        "ceiling_ratio": last.ceiling_tokens / max(1, workload.ceiling_tokens()[0]),
    }
    report = Report(bench="simulate", host=Host.here(), metrics=metrics, grids=grids(outcomes))
    show(report, as_json=as_json, as_markdown=as_markdown)


class _Progress:
    """Says now and then how far a fleet has come."""

    def __init__(self, name: str, lasts_s: float) -> None:
        self._name = name
        self._lasts_s = lasts_s
        self._told_s = time.perf_counter()

    def __call__(self, virtual_s: float) -> None:
        now_s = time.perf_counter()
        if now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            share = min(1.0, virtual_s / self._lasts_s) if self._lasts_s else 1.0
            errors.print(f"  {self._name}: {virtual_s:,.0f} s of virtual time, {share:.0%}", markup=False)


@contextmanager
def _refusals(trace: Path) -> Iterator[None]:
    try:
        yield
    except (ProfileError, TraceError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"can't read {trace}: {error.strerror or error}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error


__all__ = ["simulate"]
