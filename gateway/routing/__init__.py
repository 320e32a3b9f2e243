"""Routing policies: choose an instance, with a reason. To add one: one file, and one line in ``POLICIES``."""

from collections.abc import Callable
from types import MappingProxyType

from gateway.routing.base import Candidate, CostModel, Decision, Query, RoutingPolicy, Speeds
from gateway.routing.calibration import Calibration
from gateway.routing.consistent_hash import ConsistentHash
from gateway.routing.cost_aware import CostAware
from gateway.routing.field import NOTHING_HELD, CandidateColumns, Field, Held, make_candidate
from gateway.routing.learned import Guess, LearnedAffinity, learned_identity, sent_identity
from gateway.routing.least_load import LeastLoad
from gateway.routing.prefix_affinity import PrefixAffinity
from gateway.routing.recent import RecentRoutes
from gateway.routing.round_robin import RoundRobin

POLICIES: MappingProxyType[str, Callable[[CostModel], RoutingPolicy]] = MappingProxyType(
    {
        "cost_aware": CostAware,
        "prefix_affinity": PrefixAffinity,
        "consistent_hash": ConsistentHash,
        "least_load": LeastLoad,
        "round_robin": RoundRobin,
    }
)
"""Setting ``routing_policy`` -> constructor."""

__all__ = [
    "NOTHING_HELD",
    "POLICIES",
    "Calibration",
    "Candidate",
    "CandidateColumns",
    "ConsistentHash",
    "CostAware",
    "CostModel",
    "Decision",
    "Field",
    "Guess",
    "Held",
    "LearnedAffinity",
    "LeastLoad",
    "PrefixAffinity",
    "Query",
    "RecentRoutes",
    "RoundRobin",
    "RoutingPolicy",
    "Speeds",
    "learned_identity",
    "make_candidate",
    "sent_identity",
]
