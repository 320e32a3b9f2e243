"""What is cached is loaded, and what two prompts share is computed once.

For each prompt that is to be computed whole: the beginning that its device holds becomes loads; after that, what an
earlier prompt of the graph has there and both share is loaded from its piece; the rest is computed. A transfer of the
prompt then moves only what its target doesn't have in either way. The last token of a prompt is always computed: an
answer begins with what follows from it.

A prompt that loads from another's piece waits for it, so where the graph has batches already, they
are dissolved.
"""

from dataclasses import replace
from typing import ClassVar

from kvcontrol.core.blocks import CacheTier
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    DecodeConfig,
    Device,
    IRNode,
    LoadConfig,
    NodeType,
    PrefillConfig,
    TransferConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.optimizer import PassContext, Rewritten
from kvcontrol.scheduler_ir.request import IRRequest
from kvcontrol.scheduler_ir.spans import KvSpan, Namer


class PrefixCacheAwarePass:
    """O(nodes + requests x requests on the same device that share a beginning)."""

    name: ClassVar[str] = "prefix_cache_aware"

    def run(self, graph: IRGraph, context: PassContext) -> Rewritten:
        """See ``IRPass``."""
        rewriting = _Rewriting(graph, context)
        for node in graph:
            rewriting.take(node)
        if not rewriting.notes:
            return Rewritten(graph=graph)
        made = IRGraph(rewriting.nodes, graph.results)
        if rewriting.shares and any(_in_batch(node) for node in made.nodes):
            made = IRGraph([_alone(node) for node in made.nodes], graph.results)
            rewriting.notes.append("batches are dissolved: prompts wait for each other now")
        return Rewritten(graph=made, notes=tuple(rewriting.notes))


def _in_batch(node: IRNode) -> bool:
    config = node.config
    return isinstance(config, PrefillConfig | DecodeConfig) and config.batch is not None


def _alone(node: IRNode) -> IRNode:
    if isinstance(node.config, PrefillConfig | DecodeConfig):
        return replace(node, config=replace(node.config, batch=None))
    return node


class _Rewriting:
    """One sweep in topological order. ``_became`` says which pieces stand for a value of the old graph."""

    def __init__(self, graph: IRGraph, context: PassContext) -> None:
        self.nodes: list[IRNode] = []
        self.notes: list[str] = []
        self.shares = False
        """Whether something waits for another prompt's piece now."""
        self._context = context
        self._whole = set(graph.results)
        """Values that stay one: results, and what others load from already (whose prompts may have changed places)."""
        self._whole.update(node.inputs[0] for node in graph if node.node_type is NodeType.LOAD and node.inputs)
        self._namer = Namer(graph)
        self._became: dict[ValueName, tuple[KvSpan, ...]] = {}
        self._there: dict[tuple[Device, bytes, int], tuple[KvSpan, ...]] = {}

    def take(self, node: IRNode) -> None:
        config = node.config
        if isinstance(config, PrefillConfig) and config.start == 0 and node.outputs[0] not in self._whole:
            self._prefill(node, config)
        elif (
            isinstance(config, TransferConfig) and node.inputs[0] in self._became and node.outputs[0] not in self._whole
        ):
            self._transfer(node, config)
        else:
            inputs = tuple(name for value in node.inputs for name in self._names(value))
            self.nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))

    def _names(self, value: ValueName) -> tuple[ValueName, ...]:
        became = self._became.get(value)
        return (value,) if became is None else tuple(span.name for span in became)

    def _prefill(self, node: IRNode, config: PrefillConfig) -> None:
        request, most = self._context.request(config.request), config.end - 1
        spans = self._held(request, node.device, most)
        held = spans[-1].end if spans else 0
        spans += self._shared(request, node.device, held, most)
        start = spans[-1].end if spans else 0
        if start:
            self.notes.append(
                f"{config.request} @{node.device}: {held} tokens are cached, {start - held} computed for another, "
                f"{config.end - start} left"
            )
            node = replace(node, inputs=tuple(span.name for span in spans), config=replace(config, start=start))
        self.nodes.append(node)
        spans.append(
            KvSpan(name=node.outputs[0], request=config.request, device=node.device, start=start, end=config.end)
        )
        self._became[node.outputs[0]] = tuple(spans)
        self._remember(request, node.device, spans)

    def _remember(self, request: IRRequest, device: Device, spans: list[KvSpan]) -> None:
        """Others may load from these what they share with them."""
        if spans[0].start == 0:
            for prefix in request.shared:
                if prefix.end <= spans[-1].end:
                    self._there.setdefault((device, prefix.key, prefix.end), tuple(spans))

    def _held(self, request: IRRequest, device: Device, most: int) -> list[KvSpan]:
        """Load what lies on a device, up to ``most`` tokens."""
        spans: list[KvSpan] = []
        start = 0
        for run in request.cached_on(device):
            end = min(run.end, most)
            if end > start:
                spans.append(self._load(request, device, start, end, tier=run.tier))
                start = end
        return spans

    def _shared(self, request: IRRequest, device: Device, start: int, most: int) -> list[KvSpan]:
        """Load from pieces of an earlier prompt with which most is shared, beyond ``start``."""
        for prefix in reversed(request.shared):
            theirs = self._there.get((device, prefix.key, prefix.end))
            if theirs is None:
                continue
            end = min(prefix.end, most)
            if end <= start:
                break
            self.shares = True
            return [
                self._load(request, device, max(start, each.start), min(end, each.end), span=each.name)
                for each in theirs
                if each.end > start and each.start < end
            ]
        return []

    def _load(  # noqa: PLR0913 - a load, part by part
        self,
        request: IRRequest,
        device: Device,
        start: int,
        end: int,
        *,
        tier: CacheTier = CacheTier.HBM,
        span: ValueName | None = None,
    ) -> KvSpan:
        name = self._namer.fresh("cached" if span is None else "shared")
        self.nodes.append(
            IRNode(
                node_type=NodeType.LOAD,
                inputs=() if span is None else (span,),
                outputs=(name,),
                config=LoadConfig(request=request.request_id, start=start, end=end, tier=tier),
                device=device,
            )
        )
        return KvSpan(name=name, request=request.request_id, device=device, start=start, end=end)

    def _transfer(self, node: IRNode, config: TransferConfig) -> None:
        """Move what the target doesn't hold, piece by piece; the last keeps the name."""
        request = self._context.request(config.request)
        arrived: list[KvSpan] = []
        if config.start == 0:
            arrived = self._held(request, config.target, config.end - 1)
            arrived += self._shared(request, config.target, arrived[-1].end if arrived else 0, config.end - 1)
        start = arrived[-1].end if arrived else config.start
        if arrived:
            self.notes.append(f"{config.request}: {start} tokens are on {config.target} and stay where they are")
        moving = [each for each in self._became[node.inputs[0]] if each.end > start and each.start < config.end]
        for number, each in enumerate(moving, 1):
            name = node.outputs[0] if number == len(moving) else self._namer.fresh(node.outputs[0])
            part = replace(config, start=max(start, each.start), end=min(config.end, each.end))
            self.nodes.append(replace(node, inputs=(each.name,), outputs=(name,), config=part))
            arrived.append(
                KvSpan(name=name, request=config.request, device=config.target, start=part.start, end=part.end)
            )
        self._became[node.outputs[0]] = tuple(arrived)
        self._remember(request, config.target, arrived)
