"""Spans of gateway and engine on their way to an OpenTelemetry collector; nothing is imported where tracing is off."""

from kvcontrol.tracing.collector import Collector, TracingError, collector_of, start_tracing

__all__ = ["Collector", "TracingError", "collector_of", "start_tracing"]
