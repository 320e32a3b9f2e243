"""Chooses instances in rotation: the one without a request for longest. The baseline of other policies."""

from typing import ClassVar

from gateway.routing.base import CostModel, Decision, Query


class RoundRobin:
    """Ignores cache and load. Fair over a changing set of candidates, unlike a counter modulo their number."""

    name: ClassVar[str] = "round_robin"

    def __init__(self, costs: CostModel) -> None:
        del costs

    def choose(self, query: Query) -> Decision:
        chosen = min(query.candidates, key=lambda each: (each.last_request, each.instance))
        return Decision(candidate=chosen, basis="round_robin", reason=query.gap or "in_turn")
