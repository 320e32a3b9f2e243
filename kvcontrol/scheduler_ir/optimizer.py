"""Runs passes over a graph, in the manner of MLIR: each takes a graph and gives one that means the same.

*Means the same*: every request gets its answer from the same tokens. Order, places of work and memory may differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.shown import shown
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import DecodeConfig, Device, IRError, ValueName, is_count, is_seconds
from kvcontrol.scheduler_ir.request import IRRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What a device can do; 0 is no limit. ``capacity_tokens`` of KV fit into its memory, and what leaves that may be
    saved to its tier ``spill`` (None: it has none). One step computes at most ``prefill_batch_tokens`` of
    ``prefill_batch_requests`` prompts, or goes on with ``decode_batch_requests`` answers. Raises ``IRError`` for less
    than 0.
    """

    capacity_tokens: int = 0
    prefill_batch_tokens: int = 0
    prefill_batch_requests: int = 0
    decode_batch_requests: int = 0
    spill: CacheTier | None = None

    def __post_init__(self) -> None:
        for name in _LIMITS:
            value = getattr(self, name)
            if not is_count(value) or value < 0:
                raise IRError(f"{name} is {shown(value)}; it must be a 64-bit integer >= 0, 0 is no limit")
        if self.spill is CacheTier.HBM or not isinstance(self.spill, CacheTier | None):
            raise IRError(f"spill is {shown(self.spill)}; it must be a tier below HBM, or None")


_LIMITS = ("capacity_tokens", "prefill_batch_tokens", "prefill_batch_requests", "decode_batch_requests")
_UNLIMITED = DeviceLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What passes know: the requests that a graph serves, by id, and what its devices can do.

    ``keep_for_s`` is how far ahead a reuse may be expected for KV to stay for it. Raises ``IRError`` for one that is no
    time.
    """

    requests: Mapping[str, IRRequest]
    devices: Mapping[Device, DeviceLimits] = field(default_factory=dict)
    keep_for_s: float = 300.0

    def __post_init__(self) -> None:
        for what, given in (("requests", self.requests), ("devices", self.devices)):
            if not isinstance(given, Mapping):
                raise IRError(f"{what} are {shown(given)}; they must be a mapping, by id")
        if not (is_seconds(self.keep_for_s) and self.keep_for_s >= 0):
            raise IRError(f"keep_for_s is {shown(self.keep_for_s)}; it must be a finite number of seconds >= 0")

    @classmethod
    def of(cls, requests: Sequence[IRRequest], **limits: DeviceLimits) -> "PassContext":
        """Return a context for ``requests``, with limits by device."""
        return cls(
            requests={each.request_id: each for each in requests},
            devices={Device(name): each for name, each in limits.items()},
        )

    def request(self, request_id: str) -> IRRequest:
        """Raises ``IRError`` for a request that the context doesn't have."""
        found = self.requests.get(request_id)
        if found is None:
            raise IRError(f"request {shown(request_id)} is in the graph and not in the context of its passes")
        return found

    def limits(self, device: Device) -> DeviceLimits:
        return self.devices.get(device, _UNLIMITED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """What a pass made, and what it did, in words; no words when it changed nothing."""

    graph: IRGraph
    notes: tuple[str, ...] = ()


class IRPass(Protocol):
    """A pure function of graph and context. Run twice, it changes nothing the second time."""

    name: ClassVar[str]

    def run(self, graph: IRGraph, context: PassContext) -> Rewritten:
        """Return a graph that means the same; raises ``IRError`` for one that it can't read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """What one pass did."""

    name: str
    changed: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimized:
    """The last graph, and what each pass did, in order."""

    graph: IRGraph
    reports: tuple[PassReport, ...]


class IROptimizer:
    """The pass manager: runs ``passes`` in order, and refuses a pass's graph that answers other requests."""

    def __init__(self, passes: Sequence[IRPass], context: PassContext) -> None:
        self._passes = tuple(passes)
        self._context = context

    def optimize(self, graph: IRGraph) -> IRGraph:
        """Return what all passes make of a graph."""
        return self.run(graph).graph

    def run(self, graph: IRGraph) -> Optimized:
        """The same, with what each pass did."""
        answers = _answers(graph)
        reports: list[PassReport] = []
        for each in self._passes:
            made = each.run(graph, self._context)
            if _answers(made.graph) != answers:
                raise IRError(f"pass {each.name}: its graph doesn't answer the same requests as the one it was given")
            reports.append(PassReport(name=each.name, changed=made.graph != graph, notes=made.notes))
            graph = made.graph
        return Optimized(graph=graph, reports=tuple(reports))


def _answers(graph: IRGraph) -> dict[ValueName, tuple[str, int, int]]:
    """Which value answers what, of those that leave the graph."""
    leaving = set(graph.results)
    return {
        node.outputs[0]: (node.request, node.config.start, node.config.max_tokens)
        for node in graph.nodes
        if isinstance(node.config, DecodeConfig) and node.outputs[0] in leaving
    }
