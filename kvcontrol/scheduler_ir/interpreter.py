"""Runs whole graphs on the symbolic machine: the reference that every pass is held to."""

from collections.abc import Iterable, Mapping

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.machine import Machine, Outcome
from kvcontrol.scheduler_ir.nodes import DecodeConfig, Device, IRError, IRNode, NodeType, PrefillConfig, ValueName
from kvcontrol.scheduler_ir.optimizer import DeviceLimits
from kvcontrol.scheduler_ir.plan import PlanId
from kvcontrol.scheduler_ir.request import IRRequest


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
    """Raise ``IRError`` when nodes of one batch depend on each other, or are more than one step can do."""
    depends: dict[ValueName, frozenset[tuple[Device, NodeType, int]]] = {}
    sizes: dict[tuple[Device, NodeType, int], list[tuple[str, int]]] = {}
    for node in graph:
        above = frozenset().union(*(depends[each] for each in node.inputs))
        config = node.config
        if isinstance(config, PrefillConfig | DecodeConfig) and config.batch is not None:
            batch = (node.device, node.node_type, config.batch)
            if batch in above:
                raise IRError(f"{node.describe()}: batch {config.batch} on {node.device} depends on itself")
            tokens = config.end - config.start if isinstance(config, PrefillConfig) else 1
            sizes.setdefault(batch, []).append((config.request, tokens))
            above |= {batch}
        for value in node.outputs:
            depends[value] = above
    for (device, kind, number), parts in sizes.items():
        most = limits.get(device, DeviceLimits())
        tokens, requests = sum(each for _, each in parts), len({request for request, _ in parts})
        prefill = kind is NodeType.PREFILL
        allowed = most.prefill_batch_requests if prefill else most.decode_batch_requests
        if allowed and requests > allowed:
            raise IRError(f"{kind} batch {number} on {device} has {requests} requests; at most {allowed}")
        if prefill and most.prefill_batch_tokens and tokens > most.prefill_batch_tokens:
            raise IRError(f"{kind} batch {number} on {device} has {tokens} tokens; at most {most.prefill_batch_tokens}")


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


__all__ = ["ReferenceRunner", "check_batches", "interpret"]
