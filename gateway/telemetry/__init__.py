"""What the gateway says about itself: metrics, and one log line for each request."""

from gateway.telemetry.logs import configure_logging
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.record import Outcome, RequestRecord
from gateway.telemetry.telemetry import Telemetry

__all__ = ["Metrics", "Outcome", "RequestRecord", "Telemetry", "configure_logging"]
