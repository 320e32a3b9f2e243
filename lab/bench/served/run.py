"""``kvgate bench served``: what users get of a recorded trace, from our stack, stock LMDeploy and other servers.

Every subject gets the same requests in a closed loop of users, one subject after the other. Engines that the benchmark
starts have the same model, KV pool and batch. Each is warmed up first, with other texts, in a step that is timed apart.

- TTFT: from the moment a request is due to its first event.
- ITL: between two events. TPOT: from the first to the last event, by the tokens that the usage reports. They differ
  where an engine sends fewer events than tokens, and the report says so.
- requests/s and tokens/s: until the last request is sent, while all users are busy. A request that ends later counts by
  the share of its time before: which requests happen to be the last ones decides nothing.
- cached share: what engines reported as cached, of all prompt tokens; ceiling: what a cache without bounds would have.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from kvcontrol.core.steps import STEPS_PATH, StepsReport, StepTotals
from kvgate.engine.model import Model
from kvgate.failure import CommandError
from lab.bench.served.subjects import OURS, STOCK, Peer, Pool, Served, serving
from lab.driver.options import HttpReplay
from lab.driver.run import Replayed, replay_http
from lab.driver.summary import events_per_token, quantile
from lab.report import Cell, Grid, Host, Report

NAME: Final = "served"
SUBJECTS: Final = (OURS, STOCK)
_WARM_SCALE: Final = 0.25
_WARM_OUTPUT_TOKENS: Final = 32
_WARM_LIMIT_S: Final = 60.0
_EVENTS_ENOUGH: Final = 0.95
_LOOK_UP_S: Final = 10.0
_HEADLINES: Final = ("requests_per_s", "tpot_mean_ms", "itl_p99_ms", "itl_max_ms", "ttft_mean_ms", "cached_ratio")
_SHORT: Final = {"requests_per_s": "requests", "output_tokens_per_s": "output_tokens"}
_RATIOS: Final = ("requests_per_s", "output_tokens_per_s", "ttft_mean_ms", "ttft_p50_ms", "tpot_mean_ms", "e2e_mean_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPlan:
    """What to serve to whom. ``subjects`` are started; ``peers`` run already. ``duration_s`` is of each subject."""

    model: Model
    trace: Path
    users: int
    duration_s: float
    limit: int
    pool: Pool
    subjects: tuple[str, ...]
    peers: tuple[Peer, ...]
    up_options: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of one subject."""

    served: Served
    replayed: Replayed
    warm_up_s: float
    steps: StepTotals | None
    """Of our engine, while the trace was served."""


def run(plan: ServedPlan, say: Callable[[str], None]) -> Report:
    """Serve the trace from one subject after the other; raises ``CommandError``, ``KeyboardInterrupt`` on Ctrl-C.

    A peer that can't be measured is reported as not run: what the others took an hour for isn't lost.
    """
    unknown = [name for name in plan.subjects if name not in SUBJECTS]
    if unknown or not plan.subjects + plan.peers:
        raise CommandError(f"--subjects {', '.join(unknown) or 'none'}: allowed are {', '.join(SUBJECTS)}")
    if STOCK in plan.subjects and plan.pool.instances > 1:
        raise CommandError(
            f"--instances {plan.pool.instances}: stock LMDeploy is one server without a router before it",
            "give --subjects ours, and servers behind a router of their own as --peer",
        )
    seen = []
    for name in plan.subjects:
        say(f"{name}: starting {plan.model.name}")
        with asyncio.Runner() as runner:
            stack = AsyncExitStack()
            served = runner.run(stack.enter_async_context(serving(name, plan.model, plan.pool, plan.up_options)))
            try:
                seen.append(_measured(plan, served, say))
            finally:
                runner.run(stack.aclose())
    failed: dict[str, str] = {}
    for peer in plan.peers:
        served = Served(name=peer.name, url=peer.url, fleet_url=None, ready_s=0.0)
        try:
            seen.append(_measured(plan, served, say))
        except CommandError as error:
            failed[peer.name] = error.message
    if not seen:
        raise CommandError(f"no peer could be measured: {'; '.join(failed.values())}")
    return report_of(plan, seen, failed)


def _measured(plan: ServedPlan, served: Served, say: Callable[[str], None]) -> Seen:
    options = HttpReplay(
        target=served.url,
        model=plan.model.name if served.name in SUBJECTS else None,
        tokenizer=plan.model.folder,
        users=plan.users,
        limit=plan.limit,
        duration=plan.duration_s,
        leave_out_long=True,
        seed=plan.seed,
    )
    say(f"{served.name}: warming up")
    warm = replace(
        options,
        limit=2 * plan.users,
        scale_length=_WARM_SCALE,
        max_output=_WARM_OUTPUT_TOKENS,
        duration=_WARM_LIMIT_S,
        seed=plan.seed + 1,
    )
    warmed = replay_http(plan.trace, warm)
    before = asyncio.run(_step_totals(served))
    say(f"{served.name}: {plan.users} users for {plan.duration_s:g} s")
    replayed = replay_http(plan.trace, options)
    if warmed.interrupted or replayed.interrupted:
        raise KeyboardInterrupt
    if not any(each.ok for each in replayed.answers):
        why = next((each.why for each in replayed.answers if each.why), "none was answered in time")
        raise CommandError(f"{served.name}: not one request got a whole answer: {why}")
    after = asyncio.run(_step_totals(served))
    steps = None if before is None or after is None else after.minus(before)
    return Seen(served=served, replayed=replayed, warm_up_s=warmed.setting.elapsed_s, steps=steps)


async def _step_totals(served: Served) -> StepTotals | None:
    """Return the sums of our engines' steps; None for a server that isn't ours."""
    if served.fleet_url is None:
        return None
    timeout = aiohttp.ClientTimeout(total=_LOOK_UP_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True, trust_env=False) as session:
            async with session.get(served.fleet_url) as answer:
                engines = (await answer.json())["instances"]
            totals = StepTotals()
            for engine in engines:
                async with session.get(f"{engine['url']}{STEPS_PATH}?last=0") as answer:
                    totals = totals.plus(msgspec.json.decode(await answer.read(), type=StepsReport).totals)
            return totals
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        raise CommandError(f"{served.name}: the steps of its engines can't be read: {error!r}") from error


def report_of(plan: ServedPlan, seen: Sequence[Seen], failed: Mapping[str, str]) -> Report:
    """Return the table of all subjects, ours over each other's, and where our engines' time went."""
    figures = {each.served.name: figures_of(each) for each in seen}
    metrics = {f"{name}_{key}": own[key] for name, own in figures.items() for key in _HEADLINES}
    metrics |= _ratios(figures)
    keys = next(iter(figures.values()))
    grids = [
        Grid(
            name=f"{plan.users} users, {plan.trace.name}, {_how(plan)}",
            columns=("figure", *figures),
            rows=tuple((key, *(own[key] for own in figures.values())) for key in keys),
        )
    ]
    for each in seen:
        if each.steps is not None:
            shares = each.steps.shares()
            idle = {name: share for name, share in shares.items() if name.startswith("idle_")}
            metrics["device_idle_pct"] = 100.0 * sum(idle.values())
            rows: tuple[tuple[Cell, ...], ...] = tuple((name, 100.0 * share) for name, share in shares.items())
            grids.append(Grid(name=f"time of the device ({each.served.name})", columns=("doing", "pct"), rows=rows))
    few = {
        f"ITL of {name}": "it sends fewer events than tokens, so ITL is of events; compare TPOT"
        for name, own in figures.items()
        if own["events_per_token_ratio"] < _EVENTS_ENOUGH
    }
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=tuple(grids), not_run={**few, **failed})


def _ratios(figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return ours over each other subject's."""
    ours = figures.get(OURS, {})
    return {
        f"{OURS}_over_{name}_{_SHORT.get(key, key.rpartition('_')[0])}_ratio": ours[key] / other[key]
        for name, other in figures.items()
        for key in _RATIOS
        if ours and name != OURS and other[key]
    }


def figures_of(seen: Seen) -> dict[str, float]:
    """Return one subject's figures by name."""
    answers = [each for each in seen.replayed.answers if each.ok]
    found = seen.replayed.report.metrics
    gaps = sorted(gap for each in answers for gap in each.gaps_s)
    first = sorted(each.ttft_s for each in answers)
    several = [each for each in answers if each.completion_tokens > 1 and not each.came_at_once]
    failed = [each for each in seen.replayed.answers if not each.ok and each.why]
    busy_s = max((each.due_s for each in seen.replayed.answers), default=0.0) or seen.replayed.setting.elapsed_s
    within = [(min(1.0, (busy_s - each.due_s) / each.e2e_s), each.completion_tokens) for each in answers]
    return {
        "requests_per_s": sum(share for share, _ in within) / busy_s,
        "output_tokens_per_s": sum(share * completion for share, completion in within) / busy_s,
        **_spread_ms("ttft", first, (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))),
        "tpot_mean_ms": 1000.0 * _mean([each.tpot_s for each in several]),
        **_spread_ms("itl", gaps, (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))),
        "e2e_mean_ms": 1000.0 * _mean([each.e2e_s for each in answers]),
        "cached_ratio": found["cached_ratio"],
        "ceiling_ratio": found["ceiling_ratio"],
        "requests_ok_count": len(answers),
        "requests_failed_count": len(failed),
        "events_per_token_ratio": events_per_token(answers),
        "ready_s": seen.served.ready_s,
        "warm_up_s": seen.warm_up_s,
    }


def _spread_ms(name: str, ordered: Sequence[float], shares: Sequence[tuple[str, float]]) -> dict[str, float]:
    spread = {f"{name}_mean_ms": 1000.0 * _mean(ordered)}
    for label, share in shares:
        spread[f"{name}_{label}_ms"] = 1000.0 * quantile(ordered, share) if ordered else 0.0
    return spread


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _how(plan: ServedPlan) -> str:
    pool = plan.pool
    blocks = "blocks of their own choice" if pool.kv_blocks is None else f"{pool.kv_blocks:,} KV blocks"
    options = " ".join(plan.up_options)
    return ", ".join(
        filter(
            None,
            (
                *(f"{package} {_version(package)}" for package in ("kvgate", "lmdeploy", "torch")),
                plan.model.name,
                blocks,
                f"batches of {pool.max_batch_size}",
                f"{pool.instances} instances of ours" if pool.instances > 1 else "",
                f"DDR {pool.ddr or 'none'} for ours",
                f"kvgate up {options}" if options else "",
            ),
        )
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def small_trace(folder: Path) -> Path:
    """Write a trace of six short agent sessions for a CPU, in the agentic format, and return its path.

    Each session's prompt grows from turn to turn and keeps its beginning.
    """
    path = folder / "small_agents.jsonl"
    lines = [
        {
            "session": f"session-{session}",
            "t": 2.0 * turn,
            "in": 64 * (2 + turn),
            "out": 12,
            "think_time": 0.0,
            "api_time": 1.0,
            "runs": [[1, 2 + turn]],
        }
        for session in range(6)
        for turn in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
