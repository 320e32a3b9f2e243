"""Pieces that are used together move together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    IRNode,
    NodeType,
    TransferConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.optimizer import PassContext, Rewritten
from kvcontrol.scheduler_ir.spans import Namer
from lab.research.ir.spans import joining, spans_of


class FuseTransfersPass:
    """Adjacent pieces of one request that are used together and move between the same devices move in one transfer.

    *Used together*: apart from their transfers, exactly the same nodes take them, so none of them is ready earlier than
    another for any other reason than its own loading. What arrives is used together as well. O(fused groups x nodes).
    """

    name: ClassVar[str] = "fuse_transfers"

    def run(self, graph: IRGraph, context: PassContext) -> Rewritten:
        """See ``IRPass``."""
        del context
        fused = 0
        while (group := _fusable(graph)) is not None:
            graph = _fused(graph, group)
            fused += len(group) - 1
        return Rewritten(graph=graph, notes=(f"{fused} transfers fewer",) if fused else ())


def _fusable(graph: IRGraph) -> list[IRNode] | None:
    """The first transfers that can be one; None when there are none."""
    spans = spans_of(graph)
    groups: dict[object, list[IRNode]] = {}
    for node in graph:
        config = node.config
        if not isinstance(config, TransferConfig) or node.outputs[0] in graph.results:
            continue
        span = spans[node.inputs[0]]
        if (span.start, span.end) != (config.start, config.end) or node.inputs[0] in graph.results:
            continue
        others = tuple(each for each in graph.takers(node.inputs[0]) if each.node_type is not NodeType.TRANSFER)
        transfers = [each for each in graph.takers(node.inputs[0]) if each.node_type is NodeType.TRANSFER]
        if len(transfers) == 1:
            key = (config.request, node.device, config.target, config.transport, others, graph.takers(node.outputs[0]))
            groups.setdefault(key, []).append(node)
    for group in groups.values():
        group.sort(key=lambda node: spans[node.inputs[0]].start)
        starts = [spans[node.inputs[0]].start for node in group]
        ends = [spans[node.inputs[0]].end for node in group]
        for first in range(len(group) - 1):
            last = first
            while last + 1 < len(group) and ends[last] == starts[last + 1]:
                last += 1
            if last > first:
                return group[first : last + 1]
    return None


def _fused(graph: IRGraph, group: Sequence[IRNode]) -> IRGraph:
    namer = Namer(graph)
    source, arrived = namer.fresh(f"{group[0].inputs[0]}.joined"), group[-1].outputs[0]
    left = {node.inputs[0] for node in group}, {node.outputs[0] for node in group}
    givers = [graph.giver(node.inputs[0]) for node in group]
    configs = [node.config for node in group if isinstance(node.config, TransferConfig)]
    join = joining(source, [node.inputs[0] for node in group], configs[0].request, group[0].device)
    transfer = replace(
        group[-1],
        inputs=(source,),
        outputs=(arrived,),
        config=replace(configs[0], start=configs[0].start, end=configs[-1].end),
    )
    nodes: list[IRNode] = []
    waiting = len(givers)
    for node in graph:
        if node in group:
            if node == group[-1]:
                nodes.append(transfer)
            continue
        inputs = _replaced(_replaced(node.inputs, left[0], source), left[1], arrived)
        nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
        if node in givers:
            waiting -= 1
            if not waiting:
                nodes.append(join)
    return IRGraph(nodes, graph.results)


def _replaced(values: Sequence[ValueName], gone: set[ValueName], by: ValueName) -> tuple[ValueName, ...]:
    """The same values with ``by`` once in the place of all that are gone."""
    return tuple(dict.fromkeys(by if each in gone else each for each in values))
