"""The waiting queue's series on an instance's ``/metrics``; the counts come from the engine process."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from engines.control.families import family, histogram, single
from kvcontrol.core.policy_control import ScheduleReport
from kvcontrol.series.engine import schedule as catalogue


def schedule_series(strategy: str, report: ScheduleReport) -> Iterator[Metric]:
    """Yield one family after the other. Counters go on when a strategy is swapped."""
    classes = report.classes.items()
    yield family(catalogue.QUEUE_WAITING, (((name,), each.waiting) for name, each in classes))
    yield histogram(catalogue.QUEUE_WAIT, (((name,), each.buckets, each.wait_s) for name, each in classes))
    yield family(catalogue.QUEUE_LEFT, (((name,), each.left) for name, each in classes))
    yield family(catalogue.SCHEDULE_IN_CHARGE, [((strategy,), 1)])
    yield single(catalogue.QUEUE_OLDEST, report.oldest_s)
    yield single(catalogue.QUEUE_PROMOTIONS, report.promotions)
    yield single(catalogue.QUEUE_RETURNED, report.returned)
    yield single(catalogue.QUEUE_ERRORS, report.errors)
    yield single(catalogue.QUEUE_REPAIRS, report.repairs)
