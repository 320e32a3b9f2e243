"""Metric families of an engine: their prefix and their kinds."""

from kvcontrol.series.series import Kind, Series, Unit


def counter(name: str, unit: Unit, text: str, *labels: str, appears: str = "") -> Series:
    """Return a counter of engines; ``appears`` is the condition without which it is absent."""
    return Series(name=f"kvgate_engine_{name}", kind=Kind.COUNTER, unit=unit, help=text, labels=labels, appears=appears)


def gauge(name: str, unit: Unit, text: str, *labels: str, appears: str = "") -> Series:
    """Return a gauge of engines; ``appears`` is the condition without which it is absent."""
    return Series(name=f"kvgate_engine_{name}", kind=Kind.GAUGE, unit=unit, help=text, labels=labels, appears=appears)
