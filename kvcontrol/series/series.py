"""One metric family of a ``/metrics`` endpoint as a value: its name, type, unit and labels.

The catalogue is data alone: gateway and engines build their metrics from it, the dashboards and the documentation are
written from it, and a test holds all of them together. Names follow Prometheus: base units, ``_total`` on counters
(``exposed`` adds it), no type in the name.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What Prometheus calls the type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Unit(StrEnum):
    """What a value counts."""

    SECONDS = "seconds"
    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes per second"
    TOKENS = "tokens"
    TOKENS_PER_SECOND = "tokens per second"
    BLOCKS = "KV blocks"
    REQUESTS = "requests"
    RATIO = "ratio"
    STATE = "0 or 1"
    COUNT = "count"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A metric family. ``name`` is without ``_total``; ``appears`` states when a metric that is not always there is
    present; ``buckets`` are a histogram's upper bounds, without infinity.
    """

    name: str
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = ()
    appears: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name that stands on ``/metrics`` and in queries; a histogram's has suffixes there."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind is Kind.HISTOGRAM:
            return (f"{self.name}_bucket", f"{self.name}_count", f"{self.name}_sum")
        return (self.exposed,)
