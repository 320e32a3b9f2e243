"""Everything ``kvgate bench prefix`` measures, in order, put into one report."""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.gateway import fingerprint
from lab.bench.prefix import fleet, index, peer, race, replay, sglang_radix
from lab.bench.prefix.lookup_times import LookupTimes, Quantiles
from lab.report import Cell, Grid, Host, Report
from lab.traces import AGENTIC, MOONCAKE, Request, read_by_time, read_trace

NAME = "prefix"
SMALL_BLOCKS = 100_000
_NO_BOUND = 1 << 40
_CAPACITIES = (1_000, 5_859, 50_000)
"""Blocks, for bounded replays: of 512 tokens in Mooncake's trace, of 64 in the agentic one."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace to replay: its name in the report, its file below the traces' folder, and its reader."""

    name: str
    file: str
    read: Callable[[Path], Iterable[Request]]


TRACES = (
    Trace(name="mooncake", file=MOONCAKE, read=read_trace),
    Trace(name="agentic", file=AGENTIC, read=read_trace),
    Trace(name="agentic_together", file=AGENTIC, read=read_by_time),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """What to measure. ``traces`` and ``sglang`` are folders, None to leave that out; ``quick`` times few calls."""

    blocks: int
    instances: int
    tokenizer: Path
    traces: Path | None = None
    sglang: Path | None = None
    quick: bool = False


def run(plan: PrefixPlan, say: Progress) -> Report:
    """Measure all of the plan, and tell ``say`` before each step; the peer comes first, as it may be refused."""
    metrics: dict[str, float] = {}
    peers, not_run = _races(plan, say)
    lookups: list[LookupTimes] = []
    sizes = sorted({min(SMALL_BLOCKS, plan.blocks), plan.blocks})
    for blocks in reversed(sizes):
        for instances in sorted({1, plan.instances}, reverse=True):
            say(f"fleet index: {blocks:,} blocks, {instances} instances")
            cell = fleet.FleetPlan(blocks=blocks, instances=instances, **_few(plan, lookups=100, naive_lookups=5))
            if (blocks, instances) == (plan.blocks, plan.instances):
                measured = fleet.run(cell)
                metrics |= measured.metrics
                lookups += measured.lookups
            else:
                lookups += fleet.lookups(cell)
            gc.collect()
    for blocks in reversed(sizes):
        say(f"one engine's index: {blocks:,} blocks")
        lookups += index.run(index.IndexPlan(blocks=blocks, **_few(plan, lookups=50))).lookups
        gc.collect()
    metrics |= index.memory(index.IndexPlan(blocks=sizes[0]))
    say("hashing and tokenization")
    metrics |= fingerprint.run(plan.tokenizer, fingerprint.FingerprintPlan(**_few(plan, repeats=1)))
    grids = [_lookup_grid("lookups", lookups), _lookup_grid("peers", peers)]
    if plan.traces is not None:
        replayed = _replays(plan.traces, _CAPACITIES[:1] if plan.quick else _CAPACITIES, say)
        metrics |= _replay_metrics(replayed)
        grids.append(_replay_grid(replayed))
    else:
        not_run["replays of traces"] = "give --traces FOLDER, which has mooncake/ and agentic/"
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=tuple(grids), not_run=not_run)


def _few(plan: PrefixPlan, **counts: int) -> dict[str, int]:
    """The counts for a quick run; otherwise the benchmark's own."""
    return counts if plan.quick else {}


def _races(plan: PrefixPlan, say: Progress) -> tuple[list[LookupTimes], dict[str, str]]:
    not_run: dict[str, str] = {}
    times: list[LookupTimes] = []
    race_plan = race.RacePlan(blocks=min(SMALL_BLOCKS, plan.blocks), **_few(plan, lookups=10))
    if plan.sglang is None:
        not_run[sglang_radix.NAME] = f"give --peer {peer.SGLANG}=FOLDER, into which its wheel is unpacked"
    else:
        say("race with SGLang's radix cache")
        times += peer.against_sglang(plan.sglang, race_plan)
    contenders: list[race.Contender[Any]] = [race.OurIndex(race_plan), race.HashedDict()]
    try:
        from lab.bench.prefix.lmdeploy_trie import LmdeployTrie

        contenders.append(LmdeployTrie())
    except ImportError as error:
        not_run["LMDeploy BlockTrie"] = f"LMDeploy can't be imported: {error}"
    say("race of " + ", ".join(contender.name for contender in contenders))
    times += race.race(contenders, race_plan)
    return times, not_run


def _lookup_grid(name: str, lookups: Sequence[LookupTimes]) -> Grid:
    columns = ["structure", "given", "held_blocks", "instances", "prompt_blocks"]
    columns += [f"{outcome}_{which}_us" for outcome in ("hit", "partial", "miss") for which in ("p50", "p99")]
    rows = tuple(
        (
            *(each.structure, each.given, each.held_blocks, each.instances, each.prompt_blocks),
            *(*_both(each.hit), *_both(each.partial), *_both(each.miss)),
        )
        for each in lookups
    )
    return Grid(name=name, columns=tuple(columns), rows=rows)


def _both(quantiles: Quantiles | None) -> tuple[Cell, Cell]:
    return (None, None) if quantiles is None else (quantiles.p50_us, quantiles.p99_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replay:
    trace: str
    capacity_blocks: int | None
    """None is room for everything: the ceiling."""
    result: replay.ReplayResult
    share_of_ceiling: float


def _replays(folder: Path, capacities: Sequence[int], say: Progress) -> list[_Replay]:
    found: list[_Replay] = []
    for trace in TRACES:
        say(f"replay of {trace.name}")
        ceiling = replay.replay(trace.read(folder / trace.file), capacity_blocks=_NO_BOUND)
        found.append(_Replay(trace=trace.name, capacity_blocks=None, result=ceiling, share_of_ceiling=1.0))
        for capacity in capacities:
            bounded = replay.replay(trace.read(folder / trace.file), capacity_blocks=capacity)
            share = bounded.token_hit_rate / ceiling.token_hit_rate
            found.append(_Replay(trace=trace.name, capacity_blocks=capacity, result=bounded, share_of_ceiling=share))
    return found


def _replay_metrics(replays: Sequence[_Replay]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for each in replays:
        if each.capacity_blocks is None:
            metrics[f"ceiling_{each.trace}_blocks_ratio"] = each.result.block_hit_rate
            metrics[f"ceiling_{each.trace}_tokens_ratio"] = each.result.token_hit_rate
        else:
            metrics[f"share_of_ceiling_{each.trace}_{each.capacity_blocks}_blocks_ratio"] = each.share_of_ceiling
    return metrics


def _replay_grid(replays: Sequence[_Replay]) -> Grid:
    columns = ("trace", "capacity_blocks", "requests", "hit_blocks", "hit_tokens", "hit_requests", "share_of_ceiling")
    rows = tuple(
        (
            *(each.trace, "all" if each.capacity_blocks is None else each.capacity_blocks, each.result.requests),
            *(each.result.block_hit_rate, each.result.token_hit_rate, each.result.request_hit_rate),
            each.share_of_ceiling,
        )
        for each in replays
    )
    return Grid(name="replays", columns=columns, rows=rows)
