"""The pace's series on an instance's ``/metrics``; the counts come from the engine process."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from engines.control.families import family, single
from kvcontrol.core.policy_control import PaceReport
from kvcontrol.series.engine import schedule as catalogue


def pace_series(name: str, report: PaceReport) -> Iterator[Metric]:
    """Yield one family after the other. Counters go on when a pace is swapped."""
    yield family(catalogue.PACE_IN_CHARGE, [((name,), 1)])
    yield single(catalogue.PACE_TARGET, report.target_s)
    yield single(catalogue.PACE_CHUNK, report.chunk_tokens)
    yield family(catalogue.PACE_STEPS, (((reason,), count) for reason, count in report.decisions.items()))
    yield single(catalogue.PACE_UNMET, bool(report.unmet))
    outcomes = {"overtook": report.overtook - report.gave_way, "gave_way": report.gave_way}
    yield family(catalogue.PACE_OVERTOOK, (((outcome,), count) for outcome, count in outcomes.items()))
    yield single(catalogue.PACE_ERRORS, report.errors)
