"""What the gateway tells instances beside requests: KV budgets, policies, resets."""

from gateway.fleet.control import InstanceControl, InstanceControlError
from gateway.fleet.keeper import FleetKeeper, InstanceReport, Wishes
from gateway.fleet.policies import Choice, Policy, PolicySwap, Step, SwapBusyError, SwapReport
from gateway.fleet.reset import reset_prefix_caches

__all__ = [
    "Choice",
    "FleetKeeper",
    "InstanceControl",
    "InstanceControlError",
    "InstanceReport",
    "Policy",
    "PolicySwap",
    "Step",
    "SwapBusyError",
    "SwapReport",
    "Wishes",
    "reset_prefix_caches",
]
