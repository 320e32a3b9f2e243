"""Whether tracing is on, and the tracer; OpenTelemetry is imported only then."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import SettingsError
from gateway.settings.problems import PREFIX
from kvcontrol.tracing import TracingError, collector_of, start_tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.telemetry.tracing import RequestTracer
    from kvcontrol.tracing.outlet import SpanCounts

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """``close`` sends what waits to be sent, within seconds; it blocks."""

    tracer: "RequestTracer"
    counts: "SpanCounts"
    close: "Callable[[], None]"


def open_traces(endpoint: str | None) -> Traces | None:
    """Return what makes traces, None where nothing names a collector; raises ``SettingsError``."""
    try:
        collector = collector_of(endpoint, setting=f"{PREFIX}OTLP_ENDPOINT")
        if collector is None:
            return None
        tracing = start_tracing(collector, service="kvgate-gateway")
    except TracingError as error:
        raise SettingsError(str(error)) from None
    from gateway.telemetry.tracing import RequestTracer

    _log.info("a trace of each request is sent to %s", collector.url)
    return Traces(tracer=RequestTracer(tracing), counts=tracing.counts, close=tracing.close)
