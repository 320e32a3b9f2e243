"""What is to be done for one or more requests, and the calls to instances that it comes down to.

A gateway can't tell an engine to run single steps: it calls instances, and each call makes its instance do several.
``legs`` is that view: one leg for each stretch of nodes that one call to one instance carries out, in order.

    hybrid      ANSWER(load, prefill, decode)
    separated   PREFILL(load, prefill)  HANDOVER(transfer, evict)  ANSWER(load, decode)
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import Device, NodeType

PlanId = NewType("PlanId", str)


class LegKind(StrEnum):
    """What a leg is for whoever walks the plan.

    ``PREFILL``: have ``device`` compute the prompt and keep its KV; nobody sees an answer. ``HANDOVER``: the KV goes
    from ``device`` to ``target`` by ``transport``, and ``device`` lets go of it. ``ANSWER``: ``device`` answers, and
    that is what the client gets.
    """

    PREFILL = "prefill"
    HANDOVER = "handover"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One stretch of a plan. ``target`` is a handover's, None for the others; ``transport`` is a handover's, and its
    prefill's, as the KV is kept for it.
    """

    kind: LegKind
    device: Device
    steps: tuple[NodeType, ...]
    target: Device | None = None
    transport: KVTransport | None = None


class ExecutionPlan:
    """A plan, immutable. ``target_instance_id`` is who answers. The graph may be worked out when it is first asked for:
    on the way of a request only ``legs`` are needed, and they depend on its placement alone.
    """

    __slots__ = ("_graph", "legs", "plan_id", "request_ids", "target_instance_id")

    def __init__(
        self,
        plan_id: PlanId,
        request_ids: tuple[str, ...],
        target_instance_id: InstanceId,
        legs: tuple[Leg, ...],
        graph: IRGraph | Callable[[], IRGraph],
    ) -> None:
        self.plan_id = plan_id
        self.request_ids = request_ids
        self.target_instance_id = target_instance_id
        self.legs = legs
        self._graph = graph

    @property
    def ir_graph(self) -> IRGraph:
        if not isinstance(self._graph, IRGraph):
            self._graph = self._graph()
        return self._graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExecutionPlan) and (self.plan_id, self.request_ids, self.legs, self.ir_graph) == (
            other.plan_id,
            other.request_ids,
            other.legs,
            other.ir_graph,
        )

    def __hash__(self) -> int:
        return hash(self.plan_id)

    @property
    def answer(self) -> Leg:
        """The last leg, whose answer the client gets."""
        return self.legs[-1]

    @property
    def before_answer(self) -> tuple[Leg, ...]:
        """The legs that come before it; none in a hybrid plan."""
        return self.legs[:-1]
