"""What will soon be asked for again stays; what will not is let go of as soon as it is answered.

After each answer: if the request's KV is expected to be reused within ``keep_for_s``, its pieces on the answering
device are pinned for that long; if it is expected later, they are evicted. Where nothing is expected, whoever owns the
memory decides, as without this pass.
"""

from typing import ClassVar

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    DecodeConfig,
    EvictConfig,
    IRNode,
    NodeType,
    PinConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.optimizer import PassContext, Rewritten

_ENDINGS = frozenset({NodeType.PIN, NodeType.EVICT, NodeType.JOIN})
_LEAST_TTL_S = 0.001


class LifetimeAwarePass:
    """O(nodes)."""

    name: ClassVar[str] = "lifetime_aware"

    def run(self, graph: IRGraph, context: PassContext) -> Rewritten:
        """See ``IRPass``."""
        nodes: list[IRNode] = []
        notes: list[str] = []
        gone: set[ValueName] = set()
        for node in graph:
            nodes.append(node)
            if not isinstance(node.config, DecodeConfig):
                continue
            reuse_s = context.request(node.request).reuse_s
            spans = tuple(
                each
                for each in (*node.inputs, node.outputs[1])
                if not any(taker.node_type in _ENDINGS for taker in graph.takers(each))
            )
            if reuse_s is None or not spans:
                continue
            keep = reuse_s <= context.keep_for_s
            if not keep:
                gone.update(spans)
            nodes.append(
                IRNode(
                    node_type=NodeType.PIN if keep else NodeType.EVICT,
                    inputs=spans,
                    outputs=(),
                    config=PinConfig(request=node.request, ttl_s=max(_LEAST_TTL_S, reuse_s))
                    if keep
                    else EvictConfig(request=node.request, reason="no_reuse"),
                    device=node.device,
                )
            )
            notes.append(f"{node.request}: {'kept' if keep else 'let go of'}, reuse is expected in {reuse_s:g} s")
        if not notes:
            return Rewritten(graph=graph)
        return Rewritten(graph=IRGraph(nodes, [each for each in graph.results if each not in gone]), notes=tuple(notes))
