"""From the catalogue's series to families of ``prometheus_client``, filled at a scrape."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvcontrol.series import Kind, Series

Sample = tuple[tuple[str, ...], float]
"""The labels' values in the catalogue's order, and the value."""


def family(series: Series, samples: Iterable[Sample]) -> Metric:
    """Return a counter or gauge with these samples."""
    kind = CounterMetricFamily if series.kind is Kind.COUNTER else GaugeMetricFamily
    made: CounterMetricFamily | GaugeMetricFamily = kind(series.name, series.help, labels=series.labels)
    for labels, value in samples:
        made.add_metric(labels, value)
    return made


def single(series: Series, value: float) -> Metric:
    """Return a counter or gauge without labels."""
    return family(series, [((), value)])


def histogram(series: Series, samples: Iterable[tuple[tuple[str, ...], Sequence[int], float]]) -> Metric:
    """Return a histogram: of each sample the labels' values, the count of each bucket alone (the last is of what is
    above all bounds), and the sum of what was observed.
    """
    made = HistogramMetricFamily(series.name, series.help, labels=series.labels)
    ends = [*map(str, series.buckets), "+Inf"]
    for labels, counts, total in samples:
        buckets = list(zip(ends, accumulate(counts), strict=True))
        made.add_metric(labels, buckets=buckets, sum_value=total)
    return made
