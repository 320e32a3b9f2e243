"""``kvgate bench hierarchy``: traces served through the real tiers, without bytes, put into one report and pictures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcontrol.kv_policy import EvictionPolicy, PolicyError, make_policy, parse_specs
from kvgate.failure import CommandError
from lab.bench.hierarchy.served_trace import Served, Sizes, serve
from lab.bench.pool.report import BESIDE_CHECKOUT
from lab.report import Cell, Grid, Host, Report
from lab.traces import AGENTIC, MOONCAKE, Request, read_by_time, read_trace

NAME = "hierarchy"
Progress = Callable[[str], None]
_QUICK_REQUESTS = 60
_LARGER = 10
"""DDR is so many times HBM."""

_CASES: Mapping[str, Mapping[str, Sizes]] = {
    "agentic": {
        "hbm": Sizes(hbm=4_000),
        "hbm_ddr": Sizes(hbm=4_000, ddr=_LARGER * 4_000),
        "hbm_ddr_nvme": Sizes(hbm=4_000, ddr=_LARGER * 4_000, nvme=200_000),
    },
    "conversation": {
        "hbm": Sizes(hbm=5_859),
        "hbm_ddr": Sizes(hbm=5_859, ddr=_LARGER * 5_859),
        "hbm_ddr_nvme": Sizes(hbm=5_859, ddr=_LARGER * 5_859, nvme=200_000),
        "hbm_ddr_10m_tokens": Sizes(hbm=2_000, ddr=20_000),
    },
}
"""By trace and name, in blocks of the trace: of 64 tokens, and of 512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trace served through tiers of these sizes under one policy."""

    trace: str
    tiers: str
    sizes: Sizes
    policy: str
    block_tokens: int
    served: Served


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyPlan:
    """``policies`` as in ``kvgate replay``; ``quick``: the first requests only, to see that it runs."""

    traces: Path | None
    policies: str
    quick: bool = False
    plots: Path | None = None


def run(plan: HierarchyPlan, say: Progress) -> Report:
    """Serve every trace through every hierarchy with every policy, and tell ``say`` before each.

    Raises ``CommandError`` for a policy, a folder or a trace that there isn't.
    """
    try:
        choices = parse_specs(plan.policies)
        for choice in choices:
            choice.make(capacity_blocks=1)
    except PolicyError as error:
        raise CommandError(f"--policy: {error}") from error
    made = {choice.text: choice for choice in choices}

    def make(text: str, capacity_blocks: int) -> EvictionPolicy:
        choice = made[text]
        return make_policy(choice.name, capacity_blocks=capacity_blocks, parameters=choice.parameters)

    cases: list[Case] = []
    for trace, requests in _read(plan.traces).items():
        served = requests[:_QUICK_REQUESTS] if plan.quick else requests
        for policy in made:
            for tiers, sizes in _CASES[trace].items():
                say(f"{trace}, {tiers}, {policy}: {len(served):,} requests")
                cases.append(
                    Case(
                        trace=trace,
                        tiers=tiers,
                        sizes=sizes,
                        policy=policy,
                        block_tokens=served[0].block_tokens,
                        served=serve(served, sizes, policy=policy, make_policy=make),
                    )
                )
    if plan.plots is not None:
        from lab.bench.hierarchy.plot import draw

        draw(cases, plan.plots)
    return _report(cases, quick=plan.quick)


def _read(folder: Path | None) -> dict[str, list[Request]]:
    folder = BESIDE_CHECKOUT if folder is None else folder
    for name in (AGENTIC, MOONCAKE):
        if not (folder / name).is_file():
            raise CommandError(f"--traces {folder}: there is no {name}", "name the folder that holds it")
    return {"agentic": read_by_time(folder / AGENTIC), "conversation": list(read_trace(folder / MOONCAKE))}


def _report(cases: Sequence[Case], *, quick: bool) -> Report:
    first = cases[0].policy
    metrics: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    for case in cases:
        served, sizes = case.served, case.sizes
        total = served.total
        if case.policy == first:
            name = f"{case.trace}_{case.tiers}"
            metrics[f"{name}_hit_rate"] = served.hit_rate
            metrics[f"{name}_share_of_ceiling"] = served.of_ceiling
            metrics[f"{name}_re_prefill_rate"] = served.re_prefill_rate
            metrics[f"{name}_jain_index"] = served.fairness
        rows.append(
            (
                case.trace,
                case.policy,
                sizes.hbm,
                sizes.ddr,
                sizes.nvme,
                (sizes.hbm + max(sizes.ddr, sizes.nvme)) * case.block_tokens / 1e6,
                *(part / (total.prompt or 1) for part in (total.hbm, total.ddr, total.nvme)),
                served.hit_rate,
                served.of_ceiling,
                served.re_prefill_rate,
                served.fairness,
            )
        )
    grid = Grid(
        name="served",
        columns=(
            "trace",
            "policy",
            "hbm_blocks",
            "ddr_blocks",
            "nvme_blocks",
            "distinct_tokens_m",
            "from_hbm",
            "from_ddr",
            "from_nvme",
            "hit_rate",
            "share_of_ceiling",
            "re_prefill_rate",
            "jain_index",
        ),
        rows=tuple(rows),
    )
    not_run = {"whole traces": f"--quick: the first {_QUICK_REQUESTS} requests of each"} if quick else {}
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=(grid,), not_run=not_run)
