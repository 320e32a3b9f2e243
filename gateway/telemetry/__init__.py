"""Telemetry of the gateway: metrics, traces, and one log line for each request."""

from gateway.telemetry.lag import LoopLag
from gateway.telemetry.logs import configure_logging
from gateway.telemetry.metrics import Metrics, Watched
from gateway.telemetry.record import Outcome, RequestRecord
from gateway.telemetry.telemetry import Telemetry
from gateway.telemetry.traces import Traces, open_traces
from gateway.telemetry.traffic import Interval

__all__ = [
    "Interval",
    "LoopLag",
    "Metrics",
    "Outcome",
    "RequestRecord",
    "Telemetry",
    "Traces",
    "Watched",
    "configure_logging",
    "open_traces",
]
