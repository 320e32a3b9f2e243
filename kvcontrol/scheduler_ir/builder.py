"""From requests to the plainest graph that serves them: compute every prompt whole, then answer.

What makes it good (caches, batches, order, memory) is the passes' work; that a graph means what it should can be seen
here at a glance.
"""

from collections.abc import Iterable, Sequence

from kvcontrol.core.shown import shown
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    DecodeConfig,
    EvictConfig,
    IRError,
    IRNode,
    NodeType,
    PrefillConfig,
    TransferConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.request import IRRequest


class IRBuilder:
    """Holds nothing; an object so that it can be handed to whoever builds graphs."""

    def build(self, requests: Sequence[IRRequest]) -> IRGraph:
        """Return the graph of ``requests`` in their order; raises ``IRError`` for an id that comes twice. O(requests).

        Values are named ``kv``, ``moved``, ``answer`` and ``tail``, with the request's place after it when there are
        several. The results are answers and tails.
        """
        if not isinstance(requests, Iterable):
            raise IRError(f"requests: {shown(requests)} is no sequence")
        requests = tuple(requests)
        for each in requests:
            if not isinstance(each, IRRequest):
                raise IRError(f"requests: {shown(each)} is no IRRequest")
        if len({each.request_id for each in requests}) != len(requests):
            raise IRError("a request is named twice; each id may appear once")
        nodes: list[IRNode] = []
        results: list[ValueName] = []
        for number, request in enumerate(requests):
            suffix = "" if len(requests) == 1 else str(number)
            nodes += _whole(request, suffix)
            results += nodes[-1].outputs
        return IRGraph(nodes, results)


def _whole(request: IRRequest, suffix: str) -> list[IRNode]:
    place = request.placement
    kv = ValueName(f"kv{suffix}")
    nodes = [
        IRNode(
            node_type=NodeType.PREFILL,
            inputs=(),
            outputs=(kv,),
            config=PrefillConfig(request=request.request_id, start=0, end=request.prompt_tokens),
            device=place.prefill,
        )
    ]
    prompt = kv
    if place.handover is not None:
        prompt = ValueName(f"moved{suffix}")
        nodes += [
            IRNode(
                node_type=NodeType.TRANSFER,
                inputs=(kv,),
                outputs=(prompt,),
                config=TransferConfig(
                    request=request.request_id,
                    start=0,
                    end=request.prompt_tokens,
                    target=place.answer,
                    transport=place.handover.transport,
                ),
                device=place.prefill,
            ),
            IRNode(
                node_type=NodeType.EVICT,
                inputs=(kv,),
                outputs=(),
                config=EvictConfig(request=request.request_id, reason="handed_over"),
                device=place.prefill,
            ),
        ]
    nodes.append(
        IRNode(
            node_type=NodeType.DECODE,
            inputs=(prompt,),
            outputs=(ValueName(f"answer{suffix}"), ValueName(f"tail{suffix}")),
            config=DecodeConfig(request=request.request_id, start=request.prompt_tokens, max_tokens=request.max_tokens),
            device=place.answer,
        )
    )
    return nodes
