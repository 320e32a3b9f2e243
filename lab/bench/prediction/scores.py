"""How good predictions of lifetimes are on traces: learnt online, judged on the last part alone, the constant beside.

At each beginning the predictor is told of what has ended by then, and asked. The first ``train`` share is for learning;
what was said of the rest is judged against what came. Predictors go on learning all the time, as they would in use.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lab.bench.prediction.kendall import kendall_tau
from lab.bench.prediction.lifetimes import Lifetime, known_in_order
from lab.research.lifetimes.calibration import NEAR
from lab.research.lifetimes.lifetime import LifetimePrediction, LifetimePredictor

_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionScore:
    """Of one predictor on one kind of lifetimes. ``mae_gain`` is against ``constant_mae``, the training part's median.

    ``p90_covers`` is the share that stayed below the high quantile, ``within_quarter`` the share within a quarter of
    what was said, ``calibration_error`` how far confidences were from that, on average. ``usable`` is the share above
    the threshold, with how many of those were within a quarter. Times are CPU time of the thread.
    """

    predictor: str
    lifetimes: int
    mae: float
    constant_mae: float
    mae_gain: float
    kendall_tau: float
    p90_covers: float
    within_quarter: float
    calibration_error: float
    usable: float
    usable_within_quarter: float
    later_mae: float
    """The same error at ``later_age``, of those that get that old."""
    later_constant_mae: float
    predict_p50_us: float
    predict_p99_us: float
    learn_mean_us: float


def score(
    predictor: LifetimePredictor, lifetimes: Sequence[Lifetime], *, later_age: float, train: float = 0.7
) -> PredictionScore:
    """Run a predictor that has learnt nothing over all lifetimes. ``ValueError`` where too few are left to judge."""
    first = int(train * len(lifetimes))
    if first < 1 or len(lifetimes) - first < _BINS:
        raise ValueError(f"{len(lifetimes)} lifetimes are too few to learn from some and judge the others")
    constant = statistics.median(each.lifetime for each in lifetimes[:first])
    older = [each.lifetime - later_age for each in lifetimes[:first] if each.lifetime > later_age]
    later_constant = statistics.median(older) if older else 0.0
    judged: list[tuple[float, LifetimePrediction]] = []
    later: list[tuple[float, float]] = []
    took_s: list[float] = []
    learning_s, learnt = 0.0, 0
    for place, (lifetime, ended) in enumerate(known_in_order(lifetimes)):
        began = time.thread_time()
        for each in ended:
            predictor.update(each.features, each.lifetime)
        learning_s += time.thread_time() - began
        learnt += len(ended)
        if place < first:
            continue
        began = time.thread_time()
        prediction = predictor.predict_ttl(lifetime.features)
        took_s.append(time.thread_time() - began)
        if prediction is None:
            prediction = LifetimePrediction(left=constant, left_p90=constant, confidence=0.0, usable=False)
        judged.append((lifetime.lifetime, prediction))
        if lifetime.lifetime > later_age:
            old = predictor.predict_ttl(replace(lifetime.features, age=later_age))
            later.append((lifetime.lifetime - later_age, later_constant if old is None else old.left))
    actual = [lifetime for lifetime, _ in judged]
    said = [prediction for _, prediction in judged]
    near = [abs(lifetime - each.left) <= NEAR * each.left for lifetime, each in judged]
    usable = [within for within, each in zip(near, said, strict=True) if each.usable]
    mae = _mean([abs(lifetime - each.left) for lifetime, each in judged])
    constant_mae = _mean([abs(lifetime - constant) for lifetime in actual])
    took_s.sort()
    return PredictionScore(
        predictor=predictor.name,
        lifetimes=len(judged),
        mae=mae,
        constant_mae=constant_mae,
        mae_gain=1 - mae / constant_mae if constant_mae else 0.0,
        kendall_tau=kendall_tau([each.left for each in said], actual),
        p90_covers=_mean([float(lifetime <= each.left_p90) for lifetime, each in judged]),
        within_quarter=_mean([float(each) for each in near]),
        calibration_error=_calibration_error([each.confidence for each in said], near),
        usable=len(usable) / len(judged),
        usable_within_quarter=_mean([float(each) for each in usable]),
        later_mae=_mean([abs(left - each) for left, each in later]),
        later_constant_mae=_mean([abs(left - later_constant) for left, _ in later]),
        predict_p50_us=took_s[len(took_s) // 2] * 1e6,
        predict_p99_us=took_s[len(took_s) * 99 // 100] * 1e6,
        learn_mean_us=1e6 * learning_s / max(1, learnt),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _calibration_error(confidences: Sequence[float], near: Sequence[bool]) -> float:
    """Return the mean distance, weighted by how many there are, of confidence and share, over ten ranges of it."""
    ranges: list[list[tuple[float, bool]]] = [[] for _ in range(_BINS)]
    for confidence, within in zip(confidences, near, strict=True):
        ranges[min(_BINS - 1, int(confidence * _BINS))].append((confidence, within))
    apart = sum(abs(sum(confidence - within for confidence, within in each)) for each in ranges)
    return apart / len(confidences)
