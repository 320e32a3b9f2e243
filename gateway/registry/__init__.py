"""The registry of instances: membership, health and load."""

from gateway.registry.breaker import Breaker, BreakerRules, BreakerState
from gateway.registry.health import HealthLoop
from gateway.registry.instance import Instance, InstanceSpec, InstanceState, Isolation, Model, ProbeResult, Source
from gateway.registry.load import LoadTracker, Permit, Tally, faded
from gateway.registry.membership import Membership
from gateway.registry.outliers import OutlierDetector, OutlierRules
from gateway.registry.registry import Registry

__all__ = [
    "Breaker",
    "BreakerRules",
    "BreakerState",
    "HealthLoop",
    "Instance",
    "InstanceSpec",
    "InstanceState",
    "Isolation",
    "LoadTracker",
    "Membership",
    "Model",
    "OutlierDetector",
    "OutlierRules",
    "Permit",
    "ProbeResult",
    "Registry",
    "Source",
    "Tally",
    "faded",
]
