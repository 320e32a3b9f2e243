"""A slice of a trace served live: the real gateway and simulated engines in real time, beside what is simulated of it.

A machine carries few engines, so a slice is for a part of a fleet, with the same part of the load: some of the trace's
requests, at so much less of their rate. Requests that the trace has at one moment are spread until the next: in which
order a burst is served is otherwise decided by whose prompt is read first. What the two differ in is the gateway's and
the engines' own work, the network between them, and events that take their time.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Final

import aiohttp

from kvgate.boards import StartBoard
from kvgate.display import errors
from kvgate.engine.model import Model
from kvgate.host.ports import LOOPBACK, reserved_ports
from kvgate.supervision.child import ChildSpec
from kvgate.supervision.probe import HttpProbe
from kvgate.supervision.serving import until_all_serve
from kvgate.supervision.supervisor import Supervisor
from kvgate.up.stack import GatewayOptions, Routing, gateway_child
from lab.driver.options import HttpReplay
from lab.driver.run import Replayed, drive
from lab.driver.target import LOOK_UP_S, foreign_errors
from lab.report import Cell, Grid
from lab.simulate.board import FleetBoard
from lab.simulate.busy import Busy, Spent
from lab.simulate.outcome import FleetOutcome, quantile
from lab.simulate.snapshot import MODEL
from lab.simulate.study import Study
from lab.simulate.workload import Workload
from lab.traces import Request

_HEALTH: Final = "/health"
_FIRST_TOKENS: Final = "lmdeploy:time_to_first_token_seconds_"
_START_LIMIT_S: Final = 120.0
_LONGEST_S: Final = 300.0
"""What one answer may take, on engines as fast as their profile."""
_PARTS: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """``instances`` of a fleet of ``fleet``, and the requests that come within ``seconds`` at that part of the rate."""

    instances: int
    fleet: int
    requests: Sequence[Request]
    speed: float
    seconds: float

    def __str__(self) -> str:
        whole = "the whole fleet" if self.instances == self.fleet else f"{self.instances} of {self.fleet} instances"
        return f"{whole}, {len(self.requests)} requests in {self.seconds:g} s"


def within(context_tokens: int, workload: Workload) -> list[Request]:
    """Return the requests that an engine can take, in order: no two at one moment, each with its answer's length."""
    ordered = spread([told(each, workload) for each in sorted(workload.requests, key=lambda each: each.at_s)])
    return [each for each in ordered if each.prompt_tokens + (each.output_tokens or 1) <= context_tokens]


def spread(requests: Sequence[Request]) -> list[Request]:
    """Let requests of one moment, which are ordered by time, come evenly until the next moment."""
    moments = [list(some) for _, some in groupby(requests, key=lambda each: each.at_s)]
    lasts_s = [after[0].at_s - some[0].at_s for some, after in pairwise(moments)]
    return [
        replace(each, at_s=each.at_s + place * last_s / len(some))
        for some, last_s in zip(moments, [*lasts_s, 0.0], strict=True)
        for place, each in enumerate(some)
    ]


def told(request: Request, workload: Workload) -> Request:
    """The request with the length of its answer, where the trace doesn't say it."""
    return request if request.output_tokens is not None else replace(request, output_tokens=workload.output_tokens)


def predicted(study: Study, router: str, part: Slice, board: FleetBoard) -> FleetOutcome:
    """Simulate the slice in virtual time."""
    workload = Workload(requests=part.requests, speed=part.speed, spread_s=0.0)
    with board.shown(f"prediction for {part}", workload.spans_s) as progress:
        return replace(study, instances=part.instances).run(router, workload, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """A live run; ``at_engines_s`` is the engines' own mean time to a first token, the gateway's work not included."""

    replayed: Replayed
    at_engines_s: float
    busy: Busy


def lived(study: Study, router: str, part: Slice, model: Model, profile: str) -> Lived:
    """Serve the slice with the real gateway and simulated engines on this machine. Raises ``CommandError``.

    ``profile`` is the study's as it was typed. All processes have ended when this returns or raises.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvgate-live-"))
    try:
        with reserved_ports(part.instances + 1) as ports:
            gateway = GatewayOptions(
                host=LOOPBACK,
                port=ports[0],
                api_keys=(),
                routing=Routing(router),
                state_dir=folder / "state",
            )
            engines = [_engine(study, part, model, profile, port) for port in ports[1:]]
            known = [{"id": each.name, "url": each.ready_url.removesuffix(_HEALTH)} for each in engines]
            front = gateway_child(gateway, known, tokenizer=model.folder, base=_environment())
            return asyncio.run(_serve(gateway, [engines, [front]], part, folder=folder, study=study))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _engine(study: Study, part: Slice, model: Model, profile: str, port: int) -> ChildSpec:
    """A process of the engine that the simulation has, with blocks as large as the trace's."""
    shape = study.engine().engine.with_block_tokens(part.requests[0].block_tokens)
    options = {
        "--model": str(model.folder),
        "--model-name": MODEL,
        "--profile": profile,
        "--port": str(port),
        "--block-tokens": str(shape.block_tokens),
        "--hbm-blocks": str(shape.hbm_blocks),
        "--ddr-blocks": str(shape.ddr_blocks),
        "--nvme-blocks": str(shape.nvme_blocks),
        "--max-batch": str(shape.max_batch),
        "--policy": shape.policy,
        "--tier-policy": shape.tier_policy,
        "--slow": str(study.slow),
    }
    command = [word for option in options.items() for word in option]
    return ChildSpec(
        name=f"engine-{port}",
        command=(sys.executable, "-m", "engines.sim", *command),
        environment=_environment(),
        ready_url=f"http://{LOOPBACK}:{port}{_HEALTH}",
        start_limit_s=_START_LIMIT_S,
    )


def _environment() -> Mapping[str, str]:
    """Return that of this process, without what configures somebody else's gateway or engine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    return kept | {"HF_HUB_OFFLINE": "1"}


async def _serve(
    gateway: GatewayOptions, stages: Sequence[Sequence[ChildSpec]], part: Slice, *, folder: Path, study: Study
) -> Lived:
    board = StartBoard(errors)
    async with HttpProbe() as probe, Supervisor(stages, folder, probe, board) as children:
        with board.shown():
            await until_all_serve(children, probe, gateway.url, part.instances)
        longest_s = _LONGEST_S * max(1.0, study.slow)
        asked = HttpReplay(target=gateway.url, model=MODEL, speed=part.speed, leave_out_long=True, timeout=longest_s)
        pids = {each.name: each.pid for each in children.children}
        seen: list[Lived] = []

        async def drive_all() -> None:
            before = Spent.now(gateway=[pids.pop(stages[1][0].name)], engines=pids.values())
            replayed = await drive(study.trace, part.requests, asked)
            busy = before.since()
            urls = [each.ready_url.removesuffix(_HEALTH) for each in stages[0]]
            seen.append(Lived(replayed=replayed, at_engines_s=await _first_tokens_s(urls), busy=busy))

        await children.unless_one_ends(drive_all())
        return seen[0]


async def _first_tokens_s(engines: Sequence[str]) -> float:
    """Return the mean time to a first token that engines say of themselves. Raises ``CommandError``."""
    sums = {"sum": 0.0, "count": 0.0}
    async with aiohttp.ClientSession(trust_env=False) as session:
        for url in engines:
            with foreign_errors(url):
                async with asyncio.timeout(LOOK_UP_S), session.get(f"{url}/metrics") as response:
                    lines = (await response.text()).splitlines()
            for line in lines:
                name, _, value = line.rpartition(" ")
                found = name.partition("{")[0].removeprefix(_FIRST_TOKENS)
                if found in sums:
                    sums[found] += float(value)
    return sums["sum"] / sums["count"] if sums["count"] else 0.0


def check_grid(before: FleetOutcome, seen: Lived) -> Grid:
    """Return what was predicted beside what was seen; the error is relative to what was seen. What the gateway and this
    machine add to a first token is in the live figures, but for the mean at the engines.
    """
    whole = [each for each in seen.replayed.answers if each.ok]
    ttft_s = sorted(each.ttft_s for each in whole)
    prompt = sum(each.prompt_tokens for each in whole)
    rows: list[tuple[str, float | None, float | None]] = [
        (f"ttft_p{part * 100:g}_s", before.ttft(part), quantile(ttft_s, part)) for part in _PARTS
    ]
    mean_s = _mean(before.ttft_s)
    rows = [("ttft_mean_at_engines_s", mean_s, seen.at_engines_s), ("ttft_mean_s", mean_s, _mean(ttft_s)), *rows]
    tpot_ms = before.tpot_mean_ms
    several = [each.tpot_s for each in whole if each.completion_tokens > 1 and not each.came_at_once]
    rows.append(("tpot_mean_s", None if tpot_ms is None else tpot_ms / 1e3, _mean(several)))
    rows.append(("hit_ratio", before.hit_rate, sum(each.cached_tokens for each in whole) / prompt if prompt else 0.0))
    rows.append(("answered_requests", len(before.answer_s), len(whole)))
    return Grid(
        name="check",
        columns=("figure", "predicted", "live", "error_ratio"),
        rows=tuple((*each, _error(each[1], each[2])) for each in rows),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _error(before: float | None, seen: float | None) -> Cell:
    if before is None or seen is None:
        return None
    if seen:
        return before / seen - 1
    return None if before else 0.0
