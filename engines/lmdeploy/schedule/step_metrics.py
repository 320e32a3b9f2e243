"""The steps' series on an instance's ``/metrics``; the counts come from the engine process."""

from collections.abc import Iterator

import msgspec
from prometheus_client.core import Metric

from engines.control.families import family, histogram, single
from kvcontrol.core.steps import StepHistograms, StepTotals
from kvcontrol.series.engine import schedule as catalogue


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The source of the metrics; ``lost`` steps were dropped unmeasured."""

    totals: StepTotals
    histograms: StepHistograms
    lost: int


def step_series(counts: StepCounts) -> Iterator[Metric]:
    """Yield one family after the other."""
    totals, made = counts.totals, counts.histograms
    yield histogram(
        catalogue.STEP_SECONDS, (((kind,), made.seconds[kind], totals.device_s[kind]) for kind in made.seconds)
    )
    yield histogram(
        catalogue.STEP_SEQUENCES,
        (((kind,), made.sequences[kind], made.sequences_sum[kind]) for kind in made.sequences),
    )
    yield histogram(
        catalogue.DEVICE_IDLE, (((reason,), made.idle[reason], totals.idle_s[reason]) for reason in made.idle)
    )
    yield family(catalogue.STEP_TOKENS, (((kind,), tokens) for kind, tokens in totals.tokens.items()))
    yield single(catalogue.STALLED_SECONDS, totals.stalled_s)
    yield single(catalogue.WAITED_SECONDS, totals.waited_s)
    yield single(catalogue.STEPS_LOST, counts.lost)
