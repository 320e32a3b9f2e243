"""A prompt moves while it is still being computed."""

from dataclasses import replace
from typing import ClassVar

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import IRNode, NodeType, TransferConfig, ValueName
from kvcontrol.scheduler_ir.optimizer import PassContext, Rewritten
from kvcontrol.scheduler_ir.spans import KvSpan, Namer
from lab.research.ir.spans import joining, spans_of


class OverlapPass:
    """A prompt that is computed in chunks moves chunk by chunk, each as soon as it is there.

    A transfer of joined chunks becomes one transfer of each, right after its prefill, joined again on the target; what
    else of the request moves the same way and was there before the first chunk, moves before it. A request alone is
    never answered later for it; others that use the same link may wait for a chunk. O(split transfers x nodes).
    """

    name: ClassVar[str] = "overlap"

    def run(self, graph: IRGraph, context: PassContext) -> Rewritten:
        """See ``IRPass``."""
        del context
        split = 0
        while (transfer := _splittable(graph)) is not None:
            graph = _overlapped(graph, transfer)
            split += 1
        return Rewritten(graph=graph, notes=(f"{split} transfers go along with their prefill",) if split else ())


def _splittable(graph: IRGraph) -> IRNode | None:
    for node in graph:
        if node.node_type is NodeType.TRANSFER:
            join = graph.giver(node.inputs[0])
            if join.node_type is NodeType.JOIN and any(
                graph.giver(each).node_type is NodeType.PREFILL for each in join.inputs[:-1]
            ):
                return node
    return None


def _overlapped(graph: IRGraph, transfer: IRNode) -> IRGraph:
    namer, spans, join = Namer(graph), spans_of(graph), graph.giver(transfer.inputs[0])
    config = transfer.config
    assert isinstance(config, TransferConfig)  # noqa: S101 - what it was chosen for
    parts = [spans[each] for each in join.inputs]
    moving = [each for each in parts if each.end > config.start and each.start < config.end]
    arriving = {each.name: namer.fresh(f"{transfer.outputs[0]}.part") for each in moving}
    if len(moving) == 1:
        arriving = {moving[0].name: transfer.outputs[0]}
    others = [node for node in graph.takers(join.outputs[0]) if node != transfer]
    dissolved = all(node.node_type is NodeType.EVICT for node in others) and join.outputs[0] not in graph.results
    earlier = _siblings(graph, transfer, moving[0].name)
    first = graph.giver(moving[0].name)
    nodes: list[IRNode] = []
    for node in graph:
        if node in earlier:
            continue
        if node == transfer:
            if len(arriving) > 1:
                nodes.append(joining(transfer.outputs[0], list(arriving.values()), config.request, config.target))
        elif node == join and dissolved:
            pass
        elif dissolved and join.outputs[0] in node.inputs:
            nodes.append(
                replace(
                    node,
                    inputs=tuple(
                        name for each in node.inputs for name in (join.inputs if each == join.outputs[0] else (each,))
                    ),
                )
            )
        else:
            nodes.append(node)
        if node == first:
            nodes += earlier
        nodes += [_part(transfer, config, spans[value], arriving[value]) for value in node.outputs if value in arriving]
    return IRGraph(nodes, graph.results)


def _siblings(graph: IRGraph, transfer: IRNode, chunk: ValueName) -> list[IRNode]:
    """The transfers after the prefill of a chunk, and before that of all chunks, of what was there before the chunk."""
    nodes = graph.topological_order()
    begin, end = nodes.index(graph.giver(chunk)), nodes.index(transfer)
    return [
        node
        for node in nodes[begin:end]
        if isinstance(node.config, TransferConfig)
        and (node.request, node.device) == (transfer.request, transfer.device)
        and nodes.index(graph.giver(node.inputs[0])) < begin
    ]


def _part(transfer: IRNode, config: TransferConfig, span: KvSpan, name: ValueName) -> IRNode:
    part = replace(config, start=max(config.start, span.start), end=min(config.end, span.end))
    return replace(transfer, inputs=(span.name,), outputs=(name,), config=part)
