"""The more important request goes first, of equally important ones the one that is due first, then the one that the
context names first.

What a request needs of another one (a prefix that both share and the other computes) inherits its importance, so that
nothing in between goes before it.
"""

from typing import ClassVar

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.optimizer import PassContext, Rewritten

_NEVER = float("inf")


class PriorityBasedPass:
    """Moves nodes and changes none. O(n log n + dependencies)."""

    name: ClassVar[str] = "priority_based"

    def run(self, graph: IRGraph, context: PassContext) -> Rewritten:
        """See ``IRPass``."""
        places = {request: place for place, request in enumerate(context.requests)}
        own = {
            request: (-facts.priority, _NEVER if facts.deadline_s is None else facts.deadline_s, places[request])
            for request in graph.request_ids
            for facts in [context.request(request)]
        }
        ranks = [own[node.request] for node in graph.nodes]
        before = graph.dependencies()
        for index in reversed(graph.order):
            for earlier in before[index]:
                ranks[earlier] = min(ranks[earlier], ranks[index])
        places_in_order = {index: place for place, index in enumerate(graph.order)}
        order = sorted(graph.order, key=lambda index: (ranks[index], places_in_order[index]))
        if tuple(order) == graph.order:
            return Rewritten(graph=graph)
        moved = IRGraph([graph.nodes[index] for index in order], graph.results)
        return Rewritten(graph=moved, notes=("requests go as " + ", ".join(moved.request_ids),))
