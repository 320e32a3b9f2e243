"""The least busy instance, in seconds that a new request would wait there; ties go to whoever waited longest."""

from typing import ClassVar

from gateway.routing.base import CostModel, Decision, Query
from gateway.routing.scoring import load_terms


class LeastLoad:
    """Ignores what is cached."""

    name: ClassVar[str] = "least_load"

    def __init__(self, costs: CostModel) -> None:
        self._assumed = costs.speeds()

    def choose(self, query: Query) -> Decision:
        terms = {each.instance: load_terms(each, each.speeds or self._assumed) for each in query.candidates}
        chosen = min(
            query.candidates, key=lambda each: (sum(terms[each.instance].values()), each.last_turn, each.instance)
        )
        return Decision(candidate=chosen, basis="load", reason=query.gap or "least_busy", cost_s=terms)


__all__ = ["LeastLoad"]
