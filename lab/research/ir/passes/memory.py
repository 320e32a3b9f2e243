"""No device ever holds more than it can: pieces leave before a step that needs their room, and come back before a step
that needs them.

The graph is followed in its order. Before a step that would not fit, pieces of its device that the step doesn't take
leave: first those that nothing needs any more; then those of the least important request, and of one request those
needed last; at last those that were to be kept after the plan. A piece that is needed again comes back just before:
from the tier that it was saved to where the device has one (``spill``), from the tier that it was loaded from, or by
computing it again from what precedes it. An answer's own KV, which leaves the graph only so that it may be reused,
counts as needed by nothing.

Raises ``IRError`` when one step alone needs more than its device can hold. This pass depends on the order of the nodes,
so it is the last of those that move any.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from kvcontrol.core.blocks import CacheTier
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    CONSUMING,
    DecodeConfig,
    Device,
    EvictConfig,
    IRError,
    IRNode,
    LoadConfig,
    NodeType,
    PrefillConfig,
    TransferConfig,
    ValueName,
)
from kvcontrol.scheduler_ir.optimizer import PassContext, Rewritten
from kvcontrol.scheduler_ir.spans import KvSpan, Namer
from lab.research.ir.footprint import Footprint
from lab.research.ir.spans import spans_of

_BACK = 1 << 62
"""Later than every step."""


class MemoryAwarePreemptionPass:
    """O(nodes x pieces alive) where memory is short, O(nodes) where it isn't."""

    name: ClassVar[str] = "memory_aware_preemption"

    def run(self, graph: IRGraph, context: PassContext) -> Rewritten:
        """See ``IRPass``."""
        if not any(each.capacity_tokens for each in context.devices.values()):
            return Rewritten(graph=graph)
        sweep = _Sweep(graph, context)
        for place, node in enumerate(graph):
            sweep.take(place, node)
        if not sweep.notes:
            return Rewritten(graph=graph)
        return Rewritten(graph=sweep.graph(), notes=tuple(sweep.notes))


@dataclass(slots=True)
class _Held:
    """A piece of the old graph: what it is called now, None while it is away; where it is needed, how it comes back."""

    span: KvSpan
    giver: IRNode
    uses: list[int]  # places of the steps that still take it, the last one first
    name: ValueName | None = None
    saved: CacheTier | None = None
    pinned: bool = False


class _Sweep:
    """One run over the graph in its order, writing the new one."""

    def __init__(self, graph: IRGraph, context: PassContext) -> None:
        self.notes: list[str] = []
        self._old = graph
        self._context = context
        self._namer = Namer(graph)
        self._spans = spans_of(graph)
        self._footprint = Footprint(context.requests.values(), _with_beginnings(self._spans.values()))
        self._held: dict[ValueName, _Held] = {}
        self._nodes: list[IRNode] = []
        self._results = set(graph.results)
        uses: dict[ValueName, list[int]] = {}
        for place, node in enumerate(graph):
            for value in node.inputs:
                uses.setdefault(value, []).append(place)
        self._uses = {value: places[::-1] for value, places in uses.items()}
        self._batches = max((_batch(node) or 0 for node in graph.nodes), default=0)
        self._numbers: dict[tuple[Device, NodeType, int], tuple[int, int]] = {}
        self._interruptions: Counter[Device] = Counter()

    def graph(self) -> IRGraph:
        return IRGraph(self._nodes, [each for each in self._old.results if each in self._results])

    def take(self, place: int, node: IRNode) -> None:
        """Make room for a step and write it."""
        if node.node_type is NodeType.EVICT:
            self._evict_as_given(node)
            return
        taken = [self._held[each] for each in node.inputs]
        device = _grows(node)
        protected = {id(each) for each in taken}
        for each in taken:
            self._bring_back(each, protected)
        given = self._given(node)
        if given is not None and node.node_type is not NodeType.JOIN and device is not None:
            self._free_space(device, given.span, protected, node.describe())
        names = tuple(each.name for each in taken if each.name is not None)
        self._write(node if names == node.inputs else replace(node, inputs=names))
        for each in taken:
            while each.uses and each.uses[-1] <= place:
                each.uses.pop()
            if node.node_type is NodeType.PIN:
                each.pinned = True
            if node.node_type in CONSUMING:
                self._footprint.drop(each.span)
                each.name = None
                del self._held[each.span.name]
        if given is not None:
            given.name = given.span.name
            self._held[given.span.name] = given
            self._footprint.add(given.span)

    def _given(self, node: IRNode) -> _Held | None:
        for value in node.outputs:
            if value in self._spans:
                return _Held(span=self._spans[value], giver=node, uses=list(self._uses.get(value, ())))
        return None

    def _evict_as_given(self, node: IRNode) -> None:
        """Write an evict of the old graph for those of its pieces that are still there."""
        names = []
        for value in node.inputs:
            held = self._held.pop(value)
            if held.name is not None:
                names.append(held.name)
                self._footprint.drop(held.span)
        if names:
            self._write(node if tuple(names) == node.inputs else replace(node, inputs=tuple(names)))

    def _free_space(self, device: Device, coming: KvSpan, protected: set[int], what: str) -> None:
        """Let pieces leave a device until another one fits."""
        capacity = self._context.limits(device).capacity_tokens
        if not capacity:
            return
        while self._footprint.held(device) + self._footprint.added(coming) > capacity:
            victim = self._victim(device, protected)
            if victim is None:
                needed = self._footprint.held(device) + self._footprint.added(coming)
                raise IRError(f"{what}: needs {needed} tokens on {device} at once; its capacity is {capacity}")
            self._leave(victim)

    def _victim(self, device: Device, protected: set[int]) -> _Held | None:
        free = [
            each
            for each in self._held.values()
            if each.span.device == device
            and each.name is not None
            and id(each) not in protected
            and (not self._needed(each) or self._can_come_back(each))
        ]
        if not free:
            return None

        def worth(each: _Held) -> tuple[bool, bool, int, int, int, str]:
            needed = self._needed(each)
            next_use = each.uses[-1] if needed else _BACK
            priority = self._context.request(each.span.request).priority
            return each.pinned, needed, priority if needed else 0, -next_use, -each.span.start, each.span.name

        return min(free, key=worth)

    def _needed(self, each: _Held) -> bool:
        """Whether a later step other than an evict takes it."""
        return any(self._order(place).node_type is not NodeType.EVICT for place in each.uses)

    def _order(self, place: int) -> IRNode:
        return self._old.nodes[self._old.order[place]]

    def _can_come_back(self, each: _Held) -> bool:
        """Any piece of a prompt can be computed again; what an answer added can't."""
        spill = self._context.limits(each.span.device).spill
        return spill is not None or each.saved is not None or not isinstance(each.giver.config, DecodeConfig)

    def _preceding(self, each: _Held) -> list[_Held]:
        """Pieces of the same request and device that cover what precedes a piece. Where there is a hole (something has
        not been loaded or moved there yet), a piece for it that is away.
        """
        chain: list[_Held] = []
        start = each.span.start
        while start:
            before = [
                other
                for other in self._held.values()
                if (other.span.device, other.span.request) == (each.span.device, each.span.request)
                and other.span.end <= start
            ]
            last = max(before, key=lambda other: (other.span.end, -other.span.start, other.span.name), default=None)
            if last is None or last.span.end < start:
                last = self._missing(each, 0 if last is None else last.span.end, start)
            chain.append(last)
            start = last.span.start
        return chain[::-1]

    def _missing(self, each: _Held, start: int, end: int) -> _Held:
        span = replace(each.span, name=self._namer.fresh(f"{each.span.name}.before"), start=start, end=end)
        config = PrefillConfig(request=span.request, start=start, end=end)
        giver = IRNode(node_type=NodeType.PREFILL, inputs=(), outputs=(span.name,), config=config, device=span.device)
        self._held[span.name] = held = _Held(span=span, giver=giver, uses=[])
        return held

    def _leave(self, each: _Held) -> None:
        assert each.name is not None  # noqa: S101 - a victim is there
        needed = self._needed(each)
        if each.pinned:
            self._unpin(each.name)
            each.pinned = False
        keep = self._context.limits(each.span.device).spill if needed else None
        config = EvictConfig(request=each.span.request, reason="room", keep=keep)
        self._interruptions[each.span.device] += 1
        self._nodes.append(
            IRNode(node_type=NodeType.EVICT, inputs=(each.name,), outputs=(), config=config, device=each.span.device)
        )
        self._footprint.drop(each.span)
        self._results.discard(each.span.name)
        self._results.discard(each.name)
        each.name, each.saved = None, keep or each.saved
        how = f"to {keep}" if keep is not None else "to come back" if needed else "for good"
        self.notes.append(f"{each.span.request}: [{each.span.start}, {each.span.end}) leaves {each.span.device} {how}")

    def _unpin(self, name: ValueName) -> None:
        """What was to be kept is not."""
        for index, node in enumerate(self._nodes):
            if node.node_type is NodeType.PIN and name in node.inputs:
                left = tuple(each for each in node.inputs if each != name)
                self._nodes[index : index + 1] = [replace(node, inputs=left)] if left else []
                return

    def _bring_back(self, each: _Held, protected: set[int]) -> None:
        """Have a piece there (again) that a step takes."""
        if each.name is not None:
            return
        span = each.span
        node = self._reload(each)
        if node is None:
            preceding = self._preceding(each)
            for other in preceding:
                protected.add(id(other))
                self._bring_back(other, protected)
            node = IRNode(
                node_type=NodeType.PREFILL,
                inputs=tuple(other.name for other in preceding if other.name is not None),
                outputs=(self._namer.fresh(span.name),),
                config=PrefillConfig(request=span.request, start=span.start, end=span.end),
                device=span.device,
            )
        self._free_space(span.device, span, protected, node.describe())
        self._interruptions[span.device] += 1
        self._nodes.append(node)
        each.name = node.outputs[0]
        self._footprint.add(span)

    def _reload(self, each: _Held) -> IRNode | None:
        """The load that brings a piece back; None when it has to be computed."""
        config = each.giver.config
        tier = each.saved
        if (
            tier is None
            and isinstance(config, LoadConfig)
            and not each.giver.inputs
            and config.tier is not CacheTier.HBM
        ):
            tier = config.tier
        if tier is None:
            return None
        return IRNode(
            node_type=NodeType.LOAD,
            inputs=(),
            outputs=(self._namer.fresh(each.span.name),),
            config=LoadConfig(request=each.span.request, start=each.span.start, end=each.span.end, tier=tier),
            device=each.span.device,
        )

    def _write(self, node: IRNode) -> None:
        """Add a step; one whose batch was interrupted by a piece leaving or coming goes on in a batch of its own."""
        config = node.config
        if isinstance(config, PrefillConfig | DecodeConfig) and config.batch is not None:
            batch = (node.device, node.node_type, config.batch)
            since, number = self._numbers.setdefault(batch, (self._interruptions[node.device], config.batch))
            if since != self._interruptions[node.device]:
                number = self._batches = self._batches + 1
                self._numbers[batch] = (self._interruptions[node.device], number)
            if number != config.batch:
                node = replace(node, config=replace(config, batch=number))
        self._nodes.append(node)


def _with_beginnings(spans: Iterable[KvSpan]) -> Iterator[KvSpan]:
    """Pieces, and for each what precedes it: it may have to be computed again."""
    for span in spans:
        yield span
        if span.start:
            yield replace(span, start=0, end=span.start)


def _batch(node: IRNode) -> int | None:
    return node.config.batch if isinstance(node.config, PrefillConfig | DecodeConfig) else None


def _grows(node: IRNode) -> Device | None:
    """Whose memory a step adds to."""
    if isinstance(node.config, TransferConfig):
        return node.config.target
    return node.device if node.outputs else None
