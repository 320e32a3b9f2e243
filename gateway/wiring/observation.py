"""Constructs observation: metrics, telemetry of requests, the event loop's lag, problems."""

from dataclasses import dataclass

from gateway.problems import Problems
from gateway.telemetry import LoopLag, Metrics, Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What other components report to."""

    metrics: Metrics
    telemetry: Telemetry
    lag: LoopLag
    problems: Problems


def build_observation() -> Observation:
    """Return the observers; nothing runs yet."""
    metrics = Metrics()
    telemetry = Telemetry(metrics)
    return Observation(metrics=metrics, telemetry=telemetry, lag=LoopLag(telemetry.lagged), problems=Problems())
