"""Runs whole graphs on the symbolic machine: the reference that every pass is held to."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import DecodeConfig, Device, IRError, IRNode, NodeType, PrefillConfig
from kvcontrol.scheduler_ir.optimizer import DeviceLimits
from kvcontrol.scheduler_ir.plan import PlanId
from kvcontrol.scheduler_ir.request import IRRequest
from lab.research.ir.machine import Machine, Outcome


def interpret(
    graph: IRGraph, requests: Iterable[IRRequest], limits: Mapping[Device, DeviceLimits] | None = None
) -> Outcome:
    """Run a graph in its topological order; raises ``IRError`` for the first step that can't be, or for a batch that
    is too large or depends on itself.
    """
    limits = limits or {}
    machine = Machine(requests, limits)
    for node in graph:
        machine.step(node)
    check_batches(graph, limits)
    return machine.outcome()


def check_batches(graph: IRGraph, limits: Mapping[Device, DeviceLimits]) -> None:
    """Raise ``IRError`` when batches wait for each other, or hold more than one step can do."""
    members: dict[Hashable, list[IRNode]] = {}
    for index, node in enumerate(graph.nodes):
        members.setdefault(_batch(node) or index, []).append(node)
    _check_order(graph)
    for batch, nodes in members.items():
        if isinstance(batch, _Batch):
            _check_size(batch, nodes, limits.get(batch.device, DeviceLimits()))


class _Batch(NamedTuple):
    device: Device
    kind: NodeType
    number: int

    def __str__(self) -> str:
        return f"{self.kind} batch {self.number} on {self.device}"


def _batch(node: IRNode) -> _Batch | None:
    config = node.config
    if isinstance(config, PrefillConfig | DecodeConfig) and config.batch is not None:
        return _Batch(node.device, node.node_type, config.batch)
    return None


def _check_order(graph: IRGraph) -> None:
    """All nodes of a batch taken as one, there is still an order."""
    units = [_batch(node) or index for index, node in enumerate(graph.nodes)]
    sorter: TopologicalSorter[Hashable] = TopologicalSorter()
    for index, before in enumerate(graph.dependencies()):
        if any(units[each] == units[index] for each in before):
            raise IRError(f"{graph.nodes[index].describe()}: {units[index]} depends on itself")
        sorter.add(units[index], *(units[each] for each in before))
    try:
        sorter.prepare()
    except CycleError as error:
        raise IRError("batches wait for each other: " + " -> ".join(map(str, error.args[1]))) from None


def _check_size(batch: _Batch, nodes: Sequence[IRNode], most: DeviceLimits) -> None:
    requests = len({node.request for node in nodes})
    prefill = batch.kind is NodeType.PREFILL
    allowed = most.prefill_batch_requests if prefill else most.decode_batch_requests
    if allowed and requests > allowed:
        raise IRError(f"{batch} has {requests} requests; at most {allowed}")
    tokens = sum(node.config.end - node.config.start for node in nodes if isinstance(node.config, PrefillConfig))
    if prefill and most.prefill_batch_tokens and tokens > most.prefill_batch_tokens:
        raise IRError(f"{batch} has {tokens} tokens; at most {most.prefill_batch_tokens}")


class ReferenceRunner:
    """A ``StepRunner`` that runs each plan on a machine of its own."""

    def __init__(self, requests: Iterable[IRRequest], limits: Mapping[Device, DeviceLimits] | None = None) -> None:
        self._requests = tuple(requests)
        self._limits = limits
        self._machines: dict[PlanId, Machine] = {}

    def machine(self, plan_id: PlanId) -> Machine:
        """Return a plan's machine, a fresh one before its first step."""
        return self._machines.setdefault(plan_id, Machine(self._requests, self._limits))

    def step(self, plan_id: PlanId, node: IRNode) -> None:
        """See ``StepRunner``."""
        self.machine(plan_id).step(node)

    def release(self, plan_id: PlanId) -> None:
        """See ``StepRunner``."""
        self.machine(plan_id).release()
