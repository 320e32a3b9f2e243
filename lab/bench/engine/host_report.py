"""``kvgate bench host``: what a request costs an engine's host, and what first requests cost after a start."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp

from kvgate.engine.model import Model
from lab.bench.served.subjects import OURS, Pool, serving
from lab.bench.timed_chat import ANSWER_LIMIT_S, chat
from lab.driver.target import Target
from lab.report import Grid, Host, Report

if TYPE_CHECKING:
    from lab.bench.engine.host import HostPlan

NAME: Final = "host"
_REQUESTS: Final = 10
_WORDS: Final = 150
_COLD: Final = {"KVGATE_ENGINE_WARM_UP_LIMIT_S": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRequests:
    """Seconds to the first token of the first and of the tenth request after a start."""

    start: str
    first_s: float
    tenth_s: float


def run(plan: "HostPlan", started: Model | None, say: Callable[[str], None]) -> Report:
    """Measure ``plan``, and first requests of ``started`` where it is given; raises what LMDeploy raises for a folder
    that it can't use, ``BenchmarkError``, ``CommandError`` and ``ChildFailedError``.
    """
    from lab.bench.engine.host import measure

    figures = measure(plan, say)
    metrics: dict[str, float] = {
        "prompt_tokens": plan.prompt_tokens,
        "streams": plan.streams,
    }
    for each in figures:
        metrics |= {f"{each.name}_{each.unit}": each.ours, f"stock_{each.name}_{each.unit}": each.stock}
    rows = tuple((each.name.replace("_", " "), each.unit, each.stock, each.ours) for each in figures)
    grids = [Grid(name="host_figures", columns=("what", "unit", "LMDeploy", "kvgate"), rows=rows)]
    not_run = {}
    if started is None:
        not_run["first requests"] = "--starts measures them"
    else:
        starts = [_first_requests(started, kind, say) for kind in ("warm", "cold")]
        for each_start in starts:
            metrics[f"{each_start.start}_first_ttft_ms"] = each_start.first_s * 1e3
            metrics[f"{each_start.start}_tenth_ttft_ms"] = each_start.tenth_s * 1e3
        grids.append(
            Grid(
                name="starts",
                columns=("start", "first TTFT, ms", "tenth TTFT, ms", "first / tenth"),
                rows=tuple(
                    (each.start, each.first_s * 1e3, each.tenth_s * 1e3, each.first_s / each.tenth_s) for each in starts
                ),
            )
        )
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=tuple(grids), not_run=not_run)


def _first_requests(model: Model, start: str, say: Callable[[str], None]) -> FirstRequests:
    say(f"first requests after a {start} start")
    return asyncio.run(_asked_at_once(model, start))


async def _asked_at_once(model: Model, start: str) -> FirstRequests:
    """Ask one thing after the other, each of other words, as soon as a start is ready."""
    chooser = random.Random(1)  # noqa: S311 - reproducible
    words = (__doc__ or "").split()
    pool = Pool(kv_blocks=None, max_batch_size=8, ddr=None)
    taken = []
    settings = _COLD if start == "cold" else {}
    async with serving(OURS, model, pool, (), settings) as served, aiohttp.ClientSession() as session:
        target = Target(url=served.url, model=model.name, timeout_s=ANSWER_LIMIT_S)
        for _ in range(_REQUESTS):
            text = " ".join(chooser.choice(words) for _ in range(_WORDS))
            taken.append((await chat(session, target, [{"role": "user", "content": text}], 4)).ttft_s)
    return FirstRequests(start=start, first_s=taken[0], tenth_s=taken[-1])
