"""Chooses the instance with the shortest estimated wait; ties go to the one without a request for longest."""

from typing import ClassVar

from gateway.routing.base import CostModel, Costs, Decision, Query
from gateway.routing.scoring import load_s, load_terms


class LeastLoad:
    """Ignores what is cached."""

    name: ClassVar[str] = "least_load"

    def __init__(self, costs: CostModel) -> None:
        self._assumed = costs.speeds()

    def choose(self, query: Query) -> Decision:
        assumed = self._assumed
        chosen = min(
            query.candidates, key=lambda each: (load_s(each, each.speeds or assumed), each.last_request, each.instance)
        )
        costs = Costs(query.candidates, lambda each: load_terms(each, each.speeds or assumed))
        wait_s = None if query.prompt_tokens is None else load_s(chosen, chosen.speeds or assumed)
        return Decision(candidate=chosen, basis="load", reason=query.gap or "least_busy", cost_s=costs, wait_s=wait_s)
