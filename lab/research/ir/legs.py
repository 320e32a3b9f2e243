"""The calls to instances that any graph comes down to; a gateway's plans have theirs from a table."""

from collections.abc import Iterable, Sequence
from typing import Final

from kvcontrol.core.ids import InstanceId
from kvcontrol.core.shown import shown
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import Device, IRError, IRNode, NodeType, TransferConfig
from kvcontrol.scheduler_ir.plan import ExecutionPlan, Leg, LegKind, PlanId

_COMPUTING: Final = frozenset({NodeType.LOAD, NodeType.PREFILL})


def plan_of(plan_id: PlanId, graph: IRGraph) -> ExecutionPlan:
    """Return the plan of a graph for one request, or for several that are answered by one instance."""
    decoding = {node.device for node in graph if node.node_type is NodeType.DECODE}
    if len(decoding) != 1:
        raise IRError(f"plan {shown(plan_id)}: its answers come from {len(decoding)} instances; a plan has one")
    return ExecutionPlan(plan_id, graph.request_ids, InstanceId(decoding.pop()), legs_of(graph), graph)


def legs_of(graph: IRGraph) -> tuple[Leg, ...]:
    """Return the calls that carry out a graph. Raises ``IRError`` when nothing in it answers.

    All steps of one device on one side of a handover are one leg: the engine that is called orders them itself.
    """
    nodes = graph.topological_order()
    answering = [node.device for node in nodes if node.node_type is NodeType.DECODE]
    if not answering:
        raise IRError("the graph has no decode: it answers nothing")
    answer = answering[0]
    others = [node for node in nodes if node.device != answer]
    legs: list[Leg] = []
    for device in dict.fromkeys(node.device for node in others):
        legs += _handing_over(device, [node for node in others if node.device == device])
    own = [node for node in nodes if node.device == answer]
    legs.append(Leg(kind=LegKind.ANSWER, device=answer, steps=_kinds(own)))
    return tuple(legs)


def _handing_over(device: Device, nodes: Sequence[IRNode]) -> list[Leg]:
    transfers = [node.config for node in nodes if isinstance(node.config, TransferConfig)]
    computing = [node for node in nodes if node.node_type in _COMPUTING]
    legs = []
    if computing:
        transport = transfers[0].transport if transfers else None
        legs.append(Leg(kind=LegKind.PREFILL, device=device, steps=_kinds(computing), transport=transport))
    if transfers:
        legs.append(
            Leg(
                kind=LegKind.HANDOVER,
                device=device,
                steps=_kinds(node for node in nodes if node.node_type not in _COMPUTING),
                target=transfers[0].target,
                transport=transfers[0].transport,
            )
        )
    return legs


def _kinds(nodes: Iterable[IRNode]) -> tuple[NodeType, ...]:
    """The kinds of steps, each once, in order: chunks of a prompt and several requests are the engine's affair."""
    return tuple(dict.fromkeys(node.node_type for node in nodes))
