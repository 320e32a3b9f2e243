"""``kvgate replay TRACE``: which share of a trace's prompts would each policy find, at each size of the cache?

With ``--url`` the trace is asked of a running gateway instead (``replay_target``). It is one command because both
take a trace and answer how well it is served; an option of one of them is refused with the other.
"""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvcontrol.kv_policy import POLICIES, PolicyError
from kvcontrol.kv_policy.lru import LruPolicy
from kvcontrol.kv_policy.spec import parse_specs
from kvgate.display import errors, write_out
from kvgate.failure import INTERRUPTED, CommandError
from kvgate.options import takes
from kvgate.renamed import renamed
from lab.driver.run import draw_report, replay_http, say_warnings, write_report
from lab.replay import sweep as sweeps
from lab.replay.hits import HitRates
from lab.replay.options import Order, ReplayOptions
from lab.replay.policy import replay as replay_policy
from lab.report import Grid, Host, Report
from lab.show import show
from lab.traces import Request, TraceError

_ALL = ",".join([*POLICIES, sweeps.MIN])
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Default capacities, as shares of the blocks that the trace has."""
_PICTURES = (".png", ".svg", ".pdf")
_DIGITS = 6


@renamed({"--target": "--url"})
@takes(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Replay a trace: through eviction policies, side by side, or over HTTP through a running gateway (--url)."""
    options.check_mode()
    if options.plot is not None:
        _check_plot(options.plot)
    if options.target is None:
        _through_policies(options)
    else:
        _through_a_gateway(options)


def _through_a_gateway(options: ReplayOptions) -> None:
    replayed = replay_http(options.trace, options)
    try:
        show(replayed.report, as_json=options.as_json, as_markdown=options.as_markdown)
    finally:  # where standard output can't be written the files still can
        say_warnings(replayed)
        written = [] if options.out is None else write_report(replayed, options.out)
        if options.plot is not None:
            draw_report(replayed, options.plot)
            written.append(options.plot)
        for file in written:
            errors.print(f"  {file}", markup=False, soft_wrap=True)
    if replayed.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not any(each.ok for each in replayed.answers):
        raise CommandError("not one request got a whole answer", "the table of errors says why")


def _through_policies(options: ReplayOptions) -> None:
    trace, capacity, plot = options.trace, options.capacity, options.plot
    with _refusals(trace):
        wanted = sweeps.Sweep(
            trace=trace,
            policies=parse_specs(_ALL if options.policy is None else options.policy),
            capacities=(1,) if capacity is None else capacities_of(capacity),
            by_time=options.order is Order.TIME,
            jobs=(options.jobs or cores()) if trace.is_file() else 1,  # a pipe is read once
        )
        wanted.check()
        requests = sweeps.read(wanted)
        distinct = len({block for request in requests for block in request.block_ids})
        if not distinct:
            raise CommandError(f"{trace}: no request has a block")
        if capacity is None:
            shares = dict.fromkeys(max(1, int(share * distinct)) for share in _SHARES)
            wanted = replace(wanted, capacities=tuple(shares))
        with _progress(len(wanted.policies) * len(wanted.capacities)) as done:
            rows = sweeps.run(wanted, requests, done)
    if plot is not None or not options.as_json:
        ceiling = replay_policy(requests, LruPolicy(), capacity_blocks=distinct)
        if plot is not None:
            from lab.replay.plot import draw

            draw(rows, ceiling=ceiling, title=trace.name, file=plot)
            errors.print(f"  curves: {plot}", markup=False, soft_wrap=True)
        if not options.as_json:
            show(_report(rows, requests, distinct, ceiling), as_markdown=options.as_markdown)
    if options.as_json:
        write_out(json.dumps({"trace": str(trace), "rows": [_object(row) for row in rows]}, indent=1))


@contextmanager
def _refusals(trace: Path) -> Iterator[None]:
    try:
        yield
    except PolicyError as error:
        raise CommandError(str(error)) from error
    except TraceError as error:
        raise CommandError(str(error), "traces of Mooncake's and of the agentic format can be replayed") from error
    except OSError as error:
        raise CommandError(f"can't read {trace}: {error.strerror or error}") from error
    except BrokenProcessPool as error:
        raise CommandError("a process of the replay was killed, by lack of memory?", "try --jobs 1") from error


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def capacities_of(text: str) -> tuple[int, ...]:
    """Read capacities with commas between them; ``PolicyError`` for what is none, or one that is named twice."""
    capacities = []
    for part in text.split(","):
        try:
            capacities.append(int(part.replace("_", "")))
        except ValueError:
            raise PolicyError(f"--capacity {text}: {part.strip()!r} is no whole number of blocks") from None
    if twice := {capacity for capacity in capacities if capacities.count(capacity) > 1}:
        raise PolicyError(f"--capacity {text}: {min(twice)} is named twice")
    return tuple(capacities)


def _check_plot(plot: Path) -> None:
    if plot.suffix.lower() not in _PICTURES:
        raise CommandError(f"--plot {plot}: pictures are {', '.join(_PICTURES)}")
    if not plot.absolute().parent.is_dir():
        raise CommandError(f"--plot {plot}: there is no folder {plot.absolute().parent}")
    if find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib, which isn't installed", "pip install 'kvgate[plot]'")


@contextmanager
def _progress(total: int) -> Iterator["_Done"]:
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
        disable=not errors.is_terminal,
    )
    with bars:
        yield _Done(bars, total)


class _Done:
    """Moves the bar in a terminal, prints a line for each replay elsewhere."""

    def __init__(self, bars: Progress, total: int) -> None:
        self._bars = bars
        self._task = bars.add_task("replay", total=total)
        self._total = total
        self._count = 0

    def __call__(self, what: str) -> None:
        self._count += 1
        self._bars.update(self._task, completed=self._count, description=what)
        if self._bars.disable:
            errors.print(f"  {self._count}/{self._total} {what}", markup=False, soft_wrap=True)


def _object(row: sweeps.SweepRow) -> dict[str, object]:
    rates = {name: round(rate, _DIGITS) for name, rate in asdict(row.rates).items()}
    return {"policy": row.policy, "capacity_blocks": row.capacity_blocks, **rates}


def _report(rows: Sequence[sweeps.SweepRow], requests: Sequence[Request], distinct: int, ceiling: HitRates) -> Report:
    policies = list(dict.fromkeys(row.policy for row in rows))
    capacities = list(dict.fromkeys(row.capacity_blocks for row in rows))
    tokens = {(row.policy, row.capacity_blocks): row.rates.token for row in rows}
    by_capacity = Grid(
        name="share of prompt tokens found",
        columns=("capacity_blocks", *policies),
        rows=tuple((capacity, *(tokens[policy, capacity] for policy in policies)) for capacity in capacities),
    )
    every = Grid(
        name="all rates",
        columns=("policy", "capacity_blocks", "block", "prefix", "token", "req", "token_of_ceiling"),
        rows=tuple(
            (row.policy, row.capacity_blocks, *asdict(row.rates).values(), _of(row.rates.token, ceiling.token))
            for row in rows
        ),
    )
    metrics = {
        "requests_count": len(requests),
        "accesses_blocks": sum(len(request.block_ids) for request in requests),
        "distinct_blocks": distinct,
        "block_tokens": max(request.block_tokens for request in requests),
        "ceiling_blocks_ratio": ceiling.block,
        "ceiling_tokens_ratio": ceiling.token,
    }
    return Report(bench="replay", host=Host.here(), metrics=metrics, grids=(by_capacity, every))


def _of(part: float, whole: float) -> float | None:
    return part / whole if whole else None
