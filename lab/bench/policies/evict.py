"""``kvgate bench evict``: what each shipped policy's decisions cost, put into one report; the worst is the figure."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from functools import partial

from kvcontrol.kv_policy import POLICIES, EvictionPolicy, make_policy
from kvgate.failure import CommandError
from lab.bench.policies.decisions import DecisionTimes, measure
from lab.report import Grid, Host, Report

NAME = "evict"
SIZES = {"1e5": 100_000, "1e6": 1_000_000}
QUICK_SIZES = {"1e5": 2_000, "1e6": 4_000}
"""To see that it runs; what it prints then is no measurement, and says so."""
MANY = 200

Progress = Callable[[str], None]


def run(say: Progress, *, quick: bool = False, policies: Sequence[str] | None = None) -> Report:
    """Measure policies (None: all) at all sizes, and tell ``say`` before each; ``CommandError`` for strange ones."""
    wanted = tuple(POLICIES) if policies is None else policies
    for name in wanted:
        if name not in POLICIES:
            raise CommandError(f"--policy: unknown policy {name!r}; known: {', '.join(POLICIES)}")
    if not wanted:
        raise CommandError("--policy names none", f"there are {', '.join(POLICIES)}")
    times: list[DecisionTimes] = []
    metrics: dict[str, float] = {}
    sizes = QUICK_SIZES if quick else SIZES
    for size, blocks in sizes.items():
        ones: list[DecisionTimes] = []
        many: list[DecisionTimes] = []
        for name in wanted:
            say(f"{name}: {blocks:,} blocks")
            one, more = measure(
                partial(_make, name),
                blocks=blocks,
                decisions=200 if quick else 20_000,
                many=MANY,
                many_decisions=20 if quick else 400,
            )
            ones.append(one)
            many.append(more)
            times += (one, more)
        metrics[f"victim_p50_us_{size}"] = max(each.p50_us for each in ones)
        metrics[f"victim_p99_us_{size}"] = max(each.p99_us for each in ones)
        metrics[f"victims{MANY}_p50_ms_{size}"] = max(each.p50_us for each in many) / 1e3
        metrics[f"victims{MANY}_p99_ms_{size}"] = max(each.p99_us for each in many) / 1e3
    metrics[f"victims{MANY}_ms"] = max(metrics[f"victims{MANY}_p99_ms_{size}"] for size in sizes)
    interrupted, decisions = sum(each.interrupted for each in times), sum(each.decisions for each in times)
    metrics["loop_5us_p99_us"] = max(each.loop_p99_us for each in times if each.victims == 1)
    metrics["interrupted_percent"] = 100 * interrupted / decisions
    grid = Grid(
        name="decisions",
        columns=tuple(field.name for field in fields(DecisionTimes)),
        rows=tuple(astuple(each) for each in times),
    )
    not_run = {"sizes of 10^5 and 10^6 blocks": "--quick: the figures are of a few thousand blocks"} if quick else {}
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=(grid,), not_run=not_run)


def _make(name: str, blocks: int) -> EvictionPolicy:
    return make_policy(name, capacity_blocks=blocks)
