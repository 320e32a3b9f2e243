"""The gateway's control of instances: KV budgets, policies, pins, resets."""

from gateway.fleet.control import InstanceControl, InstanceControlError
from gateway.fleet.keeper import DesiredState, FleetKeeper, InstanceReport
from gateway.fleet.policies import Choice, Policy, PolicySwap, Step, SwapBusyError, SwapReport
from gateway.fleet.reset import reset_prefix_caches

__all__ = [
    "Choice",
    "DesiredState",
    "FleetKeeper",
    "InstanceControl",
    "InstanceControlError",
    "InstanceReport",
    "Policy",
    "PolicySwap",
    "Step",
    "SwapBusyError",
    "SwapReport",
    "reset_prefix_caches",
]
