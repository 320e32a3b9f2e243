"""Prompts longer than one step are computed in chunks, and steps are filled with several prompts.

A prompt of more than ``prefill_batch_tokens`` becomes chunks of that size, joined again. Then prefills and decodes are
put into batches in their order: each joins the last batch of its device if that has room. Batches are numbered over all
devices in the order in which they are opened, and a node joins only one with a higher number than every batch it
depends on; so no two batches wait for each other.
"""

from dataclasses import replace
from typing import ClassVar

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    DecodeConfig,
    Device,
    IRNode,
    JoinConfig,
    NodeType,
    PrefillConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.optimizer import DeviceLimits, PassContext, Rewritten
from kvcontrol.scheduler_ir.spans import Namer


class BatchingEfficiencyPass:
    """O(nodes + chunks^2 of a prompt)."""

    name: ClassVar[str] = "batching_efficiency"

    def run(self, graph: IRGraph, context: PassContext) -> Rewritten:
        """See ``IRPass``."""
        chunked = _chunked(graph, context)
        rebatched, batches = batched(chunked, context)
        if rebatched == graph:
            return Rewritten(graph=graph)
        notes = [f"{len(chunked) - len(graph)} nodes more for chunks"] if len(chunked) > len(graph) else []
        return Rewritten(graph=rebatched, notes=(*notes, f"{batches} batches"))


def _chunked(graph: IRGraph, context: PassContext) -> IRGraph:
    namer = Namer(graph)
    nodes: list[IRNode] = []
    for node in graph:
        config, most = node.config, context.limits(node.device).prefill_batch_tokens
        if not isinstance(config, PrefillConfig) or not most or config.end - config.start <= most:
            nodes.append(node)
            continue
        chunks: list[ValueName] = []
        for start in range(config.start, config.end, most):
            name = namer.fresh(f"{node.outputs[0]}.chunk")
            part = replace(config, start=start, end=min(start + most, config.end))
            nodes.append(replace(node, inputs=(*node.inputs, *chunks), outputs=(name,), config=part))
            chunks.append(name)
        nodes.append(
            IRNode(
                node_type=NodeType.JOIN,
                inputs=tuple(chunks),
                outputs=node.outputs,
                config=JoinConfig(request=config.request),
                device=node.device,
            )
        )
    return graph if len(nodes) == len(graph) else IRGraph(nodes, graph.results)


class _Batch:
    """One that is being filled."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens = 0
        self.requests: set[str] = set()

    def admits(self, config: PrefillConfig | DecodeConfig, limits: DeviceLimits) -> bool:
        prefill = isinstance(config, PrefillConfig)
        requests = limits.prefill_batch_requests if prefill else limits.decode_batch_requests
        if requests and len(self.requests | {config.request}) > requests:
            return False
        most = limits.prefill_batch_tokens if prefill else 0
        return not most or self.tokens + _tokens(config) <= most

    def add(self, config: PrefillConfig | DecodeConfig) -> None:
        self.tokens += _tokens(config)
        self.requests.add(config.request)


def _tokens(config: PrefillConfig | DecodeConfig) -> int:
    return config.end - config.start if isinstance(config, PrefillConfig) else 1


def batched(graph: IRGraph, context: PassContext) -> tuple[IRGraph, int]:
    """Return the same with prefills and decodes in batches that don't wait for each other, and how many there are."""
    before = graph.dependencies()
    latest = [0] * len(graph)  # the highest batch that a node is in or depends on
    last: dict[tuple[Device, NodeType], _Batch] = {}
    nodes = list(graph.nodes)
    number = 0
    for index in graph.order:
        node = graph.nodes[index]
        latest[index] = max((latest[each] for each in before[index]), default=0)
        config = node.config
        if not isinstance(config, PrefillConfig | DecodeConfig):
            continue
        batch = last.get((node.device, node.node_type))
        limits = context.limits(node.device)
        if batch is None or batch.number <= latest[index] or not batch.admits(config, limits):
            number += 1
            batch = last[node.device, node.node_type] = _Batch(number)
        batch.add(config)
        latest[index] = batch.number
        if config.batch != batch.number:
            nodes[index] = replace(node, config=replace(config, batch=batch.number))
    return IRGraph(nodes, graph.results), number
