"""What each value of a graph is: which tokens of which request, and where they lie."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    DecodeConfig,
    Device,
    IRError,
    IRNode,
    JoinConfig,
    LoadConfig,
    NodeType,
    PrefillConfig,
    TransferConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.spans import KvSpan


def given_span(node: IRNode, taken: list[KvSpan]) -> KvSpan | None:
    """Return the piece that a node gives, from those that it takes; None when it gives none.

    Raises ``IRError`` for a join of pieces that aren't adjacent, in order and on its device.
    """
    config = node.config
    match config:
        case LoadConfig() | PrefillConfig():
            return KvSpan(
                name=node.outputs[0], request=config.request, device=node.device, start=config.start, end=config.end
            )
        case TransferConfig():
            return KvSpan(
                name=node.outputs[0], request=config.request, device=config.target, start=config.start, end=config.end
            )
        case DecodeConfig():
            return KvSpan(
                name=node.outputs[1],
                request=config.request,
                device=node.device,
                start=config.start,
                end=config.start + config.max_tokens,
            )
        case _ if node.node_type is NodeType.JOIN:
            start, end = covered(taken, of=node.describe())
            if any(each.device != node.device for each in taken):
                raise IRError(f"{node.describe()}: its pieces lie on other devices than {node.device}")
            return KvSpan(name=node.outputs[0], request=config.request, device=node.device, start=start, end=end)
        case _:
            return None


def covered(spans: Iterable[KvSpan], *, of: str) -> tuple[int, int]:
    """Return the tokens that adjacent pieces, in their order, cover together; raises ``IRError`` for a hole, an overlap
    or two requests, in the name of ``of``.
    """
    whole = list(spans)
    for left, right in pairwise(whole):
        if left.end != right.start or left.request != right.request:
            raise IRError(
                f"{of}: %{right.name} has tokens [{right.start}, {right.end}) of {right.request} after "
                f"%{left.name} with [{left.start}, {left.end}) of {left.request}; pieces follow each other"
            )
    return whole[0].start, whole[-1].end


def spans_of(graph: IRGraph) -> dict[ValueName, KvSpan]:
    """Return all pieces of a graph by name. O(nodes)."""
    known: dict[ValueName, KvSpan] = {}
    for node in graph:
        span = given_span(node, [known[each] for each in node.inputs if each in known])
        if span is not None:
            known[span.name] = span
    return known


def joining(output: ValueName, inputs: Sequence[ValueName], request: str, device: Device) -> IRNode:
    """Return the node that makes one piece of adjacent ones."""
    return IRNode(
        node_type=NodeType.JOIN,
        inputs=tuple(inputs),
        outputs=(output,),
        config=JoinConfig(request=request),
        device=device,
    )
