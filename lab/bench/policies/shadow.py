"""``kvgate bench shadow``: what it costs to let shadow policies follow the requests, put into one report."""

from collections.abc import Callable
from dataclasses import astuple, fields

from kvcontrol.kv_policy.spec import parse_specs
from lab.bench.policies.shadowing import ShadowCost, measure
from lab.report import Grid, Host, Report

NAME = "shadow"
CANDIDATES = "lru,adaptive,s3fifo,arc,lru2"
CAPACITIES = (1_000, 10_000, 100_000)
RATE_PER_S = 10
"""A busy engine: 150,000 prompt tokens a second and more."""

Progress = Callable[[str], None]


def run(say: Progress, *, candidates: str = CANDIDATES, quick: bool = False) -> Report:
    """Measure at all capacities, and tell ``say`` before each; raises ``PolicyError`` for candidates that aren't."""
    choices = parse_specs(candidates)
    costs: list[ShadowCost] = []
    for capacity_blocks in CAPACITIES:
        say(f"{len(choices)} candidates beside {capacity_blocks:,} blocks")
        requests = 200 if quick else 4_000
        costs.append(measure(choices, capacity_blocks=capacity_blocks, requests=requests, warm_up=requests))
    worst_s = max(cost.us_per_request for cost in costs) / 1e6
    metrics = {
        "shadow_us_per_request": worst_s * 1e6,
        f"shadow_core_percent_at_{RATE_PER_S}_requests_per_s": worst_s * RATE_PER_S * 100,
        "requests_per_s_at_1_percent": min(cost.requests_per_s_at_limit for cost in costs),
    }
    grid = Grid(
        name="shadows",
        columns=tuple(field.name for field in fields(ShadowCost)),
        rows=tuple(astuple(cost) for cost in costs),
    )
    not_run = {"full shadows": "--quick: they may not have begun to evict"} if quick else {}
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=(grid,), not_run=not_run)
