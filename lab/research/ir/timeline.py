"""When each step of a graph would run, on a simple machine: to compare schedules, not to predict seconds.

Each device computes one prefill or decode at a time, each link (source, target) moves one piece at a time, each
device's tiers load one piece at a time; all in the graph's order. A step begins when what it takes is there and its
resource is free. Pins, evicts and joins take no time.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields

from kvcontrol.core.shown import shown
from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import (
    DecodeConfig,
    IRError,
    IRNode,
    LoadConfig,
    PrefillConfig,
    TransferConfig,
    ValueName,
    is_seconds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """Seconds that a token takes. Raises ``IRError`` for what is no time."""

    prefill_s: float = 1.0
    decode_s: float = 1.0
    transfer_s: float = 0.5
    load_s: float = 0.1

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (is_seconds(value) and value >= 0):
                raise IRError(f"{each.name} is {shown(value)}; it must be a finite number of seconds >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When answers begin (``first_s``) and end (``answered_s``), by request, and when all is done."""

    first_s: Mapping[str, float]
    answered_s: Mapping[str, float]
    makespan_s: float


def timeline(graph: IRGraph, paces: Paces) -> Timeline:
    """Return when the answers of a graph come. O(nodes)."""
    ready: dict[ValueName, float] = {}
    free: dict[Hashable, float] = {}
    first: dict[str, float] = {}
    answered: dict[str, float] = {}
    for node in graph:
        resource, took_s = _work(node, paces)
        begin = max((ready[each] for each in node.inputs), default=0.0)
        if resource is not None:
            begin = max(begin, free.get(resource, 0.0))
            free[resource] = begin + took_s
        for value in node.outputs:
            ready[value] = begin + took_s
        if isinstance(node.config, DecodeConfig):
            first[node.request] = begin + paces.decode_s
            answered[node.request] = begin + took_s
    return Timeline(first_s=first, answered_s=answered, makespan_s=max(answered.values(), default=0.0))


def _work(node: IRNode, paces: Paces) -> tuple[Hashable | None, float]:
    match node.config:
        case PrefillConfig(start=start, end=end):
            return ("compute", node.device), (end - start) * paces.prefill_s
        case DecodeConfig(max_tokens=most):
            return ("compute", node.device), most * paces.decode_s
        case TransferConfig(start=start, end=end, target=target):
            return ("link", node.device, target), (end - start) * paces.transfer_s
        case LoadConfig(start=start, end=end):
            return ("load", node.device), 0.0 if node.inputs else (end - start) * paces.load_s
        case _:
            return None, 0.0
