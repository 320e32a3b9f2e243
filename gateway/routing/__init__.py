"""Who gets a request, and why. To add a policy: one file, and one line in ``POLICIES``."""

from collections.abc import Callable
from types import MappingProxyType

from gateway.routing.base import Candidate, CostModel, Decision, Query, RoutingPolicy
from gateway.routing.least_load import LeastLoad
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.recent import RecentRoutes
from gateway.routing.round_robin import RoundRobin

POLICIES: MappingProxyType[str, Callable[[CostModel], RoutingPolicy]] = MappingProxyType(
    {
        "prefix": PrefixAffinity,
        "round_robin": RoundRobin,
        "least_load": LeastLoad,
    }
)
"""Setting ``routing_policy`` -> constructor."""

__all__ = [
    "POLICIES",
    "Candidate",
    "CostModel",
    "Decision",
    "LeastLoad",
    "PrefixAffinity",
    "Query",
    "RecentRoutes",
    "RoundRobin",
    "RoutingPolicy",
]
