"""``kvgate bench predict``: lifetimes and prefetches predicted on traces, put into one report beside the constant."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

from kvgate.failure import CommandError
from lab.bench.pool.report import BESIDE_CHECKOUT
from lab.bench.prediction.lifetimes import AZURE, Lifetime, answers, read_azure_answers, returns
from lab.bench.prediction.prefetching import PrefetchScore, announced, speculative
from lab.bench.prediction.scores import PredictionScore, score
from lab.report import Cell, Grid, Host, Report
from lab.research.lifetimes.calibration import CalibratedPredictor
from lab.research.lifetimes.lifetime import Estimator
from lab.research.lifetimes.network import NetworkEstimator, NetworkKind
from lab.research.lifetimes.table import ConstantEstimator, TableEstimator
from lab.traces import AGENTIC, MOONCAKE, Request, read_by_time, read_trace

NAME: Final = "predict"
BASELINE: Final = "statistical"
"""Whose figures are the metrics'."""
PREDICTORS: Final[dict[str, Callable[[], Estimator]]] = {
    "constant": ConstantEstimator,
    BASELINE: TableEstimator,
    "lstm": lambda: NetworkEstimator(NetworkKind.LSTM),
    "transformer": lambda: NetworkEstimator(NetworkKind.TRANSFORMER),
}
_NETWORKS: Final = ("lstm", "transformer")
_QUICK: Final = 1_500
"""Lifetimes and requests of each trace; what it prints then is no measurement, and says so."""
_FAST_TIER: Final = 20_000
_PROBABILITIES: Final = (0.1, 0.3, 0.5)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictPlan:
    """``predictors`` by name; the statistical one is always among them."""

    traces: Path | None
    predictors: Sequence[str]
    quick: bool = False


def run(plan: PredictPlan, say: Progress) -> Report:
    """Predict all, and tell ``say`` before each; raises ``CommandError`` for a predictor or trace that there isn't."""
    for name in plan.predictors:
        if name not in PREDICTORS:
            raise CommandError(f"--predictors: there is no {name!r}: there are {', '.join(PREDICTORS)}")
    wanted = list(dict.fromkeys((BASELINE, *plan.predictors)))
    not_run: dict[str, str] = {}
    if importlib.util.find_spec("torch") is None:
        not_run |= dict.fromkeys((name for name in wanted if name in _NETWORKS), "torch isn't installed")
        wanted = [name for name in wanted if name not in _NETWORKS]
    conversation, agentic, azure = _read(plan.traces)
    most = _QUICK if plan.quick else None
    lifetimes: dict[str, tuple[list[Lifetime], float]] = {
        "azure": (azure[:most], 200),
        "conversation": (list(answers(conversation))[:most], 200),
        "agentic": (list(answers(agentic))[:most], 200),
        "conversation_returns": (returns(conversation)[:most], 120),
        "agentic_returns": (returns(agentic)[:most], 60),
    }
    if plan.quick:
        not_run["whole traces"] = f"--quick: {_QUICK} of each"
    metrics: dict[str, float] = {}
    rows: list[tuple[Cell, ...]] = []
    for kind, (each, later_age) in lifetimes.items():
        for name in wanted:
            say(f"{kind}: {name} over {len(each):,} lifetimes")
            found = score(CalibratedPredictor(PREDICTORS[name]()), each, later_age=later_age)
            rows.append((kind, *astuple(found)))
            if name == BASELINE:
                metrics |= _metrics(kind, found)
    prefetches: list[tuple[Cell, ...]] = []
    for trace, requests in (("agentic", agentic[:most]), ("conversation", conversation[:most])):
        say(f"{trace}: prefetches")
        known = announced(requests, capacity_blocks=_FAST_TIER)
        metrics[f"{trace}_prefetch_announced_precision"] = known.precision
        metrics[f"{trace}_prefetch_announced_recall"] = known.recall
        prefetches.append((trace, "announced, 4 in the queue", *_prefetch_row(known)))
        for probability in _PROBABILITIES:
            guessed = speculative(requests, capacity_blocks=_FAST_TIER, least_probability=probability)
            prefetches.append((trace, f"speculative, p >= {probability:g}", *_prefetch_row(guessed)))
    grids = (
        Grid(name="lifetimes", columns=("kind", *(field.name for field in fields(PredictionScore))), rows=tuple(rows)),
        Grid(
            name="prefetches",
            columns=(
                "trace",
                "plan",
                "prefetched_blocks",
                "used_blocks",
                "demand_blocks",
                "wasted_blocks",
                "precision",
                "recall",
            ),
            rows=tuple(prefetches),
        ),
    )
    return Report(bench=NAME, host=Host.here(), metrics=metrics, grids=grids, not_run=not_run)


def _metrics(kind: str, found: PredictionScore) -> dict[str, float]:
    return {
        f"{kind}_kendall_tau": found.kendall_tau,
        f"{kind}_mae": found.mae,
        f"{kind}_constant_mae": found.constant_mae,
        f"{kind}_mae_gain": found.mae_gain,
        f"{kind}_p90_covers": found.p90_covers,
        f"{kind}_calibration_error": found.calibration_error,
        f"{kind}_predict_p50_us": found.predict_p50_us,
        f"{kind}_predict_p99_us": found.predict_p99_us,
    }


def _prefetch_row(found: PrefetchScore) -> tuple[Cell, ...]:
    return (*astuple(found), found.precision, found.recall)


def _read(folder: Path | None) -> tuple[list[Request], list[Request], list[Lifetime]]:
    folder = BESIDE_CHECKOUT if folder is None else folder
    for name in (AGENTIC, MOONCAKE, AZURE):
        if not (folder / name).is_file():
            raise CommandError(f"--traces {folder}: there is no {name}", "name the folder that holds it")
    return (
        sorted(read_trace(folder / MOONCAKE), key=lambda request: request.at_s),
        read_by_time(folder / AGENTIC),
        list(read_azure_answers(folder / AZURE)),
    )
