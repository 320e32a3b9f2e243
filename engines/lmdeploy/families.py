"""From the catalogue's series to families of ``prometheus_client``, filled at a scrape."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

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


__all__ = ["Sample", "family", "single"]
