"""Which instances there are, how they are, and what they have to do."""

from gateway.registry.health import HealthLoop
from gateway.registry.instance import Instance, InstanceState, Model, ProbeResult
from gateway.registry.load import Load, LoadTracker, Permit
from gateway.registry.registry import Registry

__all__ = [
    "HealthLoop",
    "Instance",
    "InstanceState",
    "Load",
    "LoadTracker",
    "Model",
    "Permit",
    "ProbeResult",
    "Registry",
]
