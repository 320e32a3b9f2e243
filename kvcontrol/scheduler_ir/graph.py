"""An immutable graph of steps: checked once, when it is made.

``nodes`` stand in the order in which they are wished to run; ``topological_order`` keeps to it wherever dependencies
allow, so the order of the nodes *is* the schedule, and a pass changes the schedule by moving nodes. A node depends on
those that give what it takes; one that uses a value up also depends on everything else that takes that value.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from kvcontrol.core.shown import MOST_SHOWN, shown
from kvcontrol.scheduler_ir.nodes import CONSUMING, IRError, IRNode, ValueName
from kvcontrol.scheduler_ir.order import topological_order

_T = TypeVar("_T")


class IROptimizing(Protocol):
    """What ``IRGraph.optimize`` asks."""

    def optimize(self, graph: "IRGraph") -> "IRGraph":
        """Return a graph that means the same."""
        ...


class IRGraph:
    """Nodes, and the values that leave the graph (``results``): answers, and KV that stays.

    Equal are graphs of equal nodes in equal order.
    Raises ``IRError`` for a value that is given twice, taken and never given, taken after it was used up, given and
    neither taken nor a result; and for a cycle, with its path.
    """

    __slots__ = ("_givers", "_nodes", "_order", "_results", "_takers")

    def __init__(self, nodes: Sequence[IRNode], results: Sequence[ValueName]) -> None:
        self._nodes = _all_of("nodes", nodes, IRNode)
        self._results = _all_of("results", results, str)
        self._givers: dict[ValueName, int] = {}
        self._takers: dict[ValueName, list[int]] = {}
        self._index()
        self._check_values()
        self._order = topological_order(self.dependencies(), self._nodes)

    @property
    def nodes(self) -> tuple[IRNode, ...]:
        return self._nodes

    @property
    def results(self) -> tuple[ValueName, ...]:
        return self._results

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[IRNode]:
        """Give the nodes in topological order."""
        return (self._nodes[index] for index in self._order)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IRGraph) and self._nodes == other._nodes and self._results == other._results

    def __hash__(self) -> int:
        return hash((self._nodes, self._results))

    def __repr__(self) -> str:
        return f"IRGraph({len(self._nodes)} nodes, {len(self._results)} results)"

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests that it serves, each once, in the order of their first node."""
        return tuple(dict.fromkeys(node.request for node in self))

    def topological_order(self) -> tuple[IRNode, ...]:
        """Return the nodes so that each comes after what it depends on; among free ones the first of ``nodes``."""
        return tuple(self)

    @property
    def order(self) -> tuple[int, ...]:
        """The places of ``nodes`` in topological order."""
        return self._order

    def dependencies(self) -> list[set[int]]:
        """Return for each of ``nodes`` the places of those that it comes after."""
        before: list[set[int]] = [{self._givers[value] for value in node.inputs} for node in self._nodes]
        for takers in self._takers.values():
            for index in takers:
                if self._nodes[index].node_type in CONSUMING:
                    before[index].update(taker for taker in takers if taker != index)
        return before

    def giver(self, value: ValueName) -> IRNode:
        """Return the node that gives a value; raises ``IRError`` when there is none."""
        if value not in self._givers:
            raise IRError(f"no node gives %{value}")
        return self._nodes[self._givers[value]]

    def takers(self, value: ValueName) -> tuple[IRNode, ...]:
        """Return the nodes that take a value, in the order of ``nodes``."""
        return tuple(self._nodes[index] for index in self._takers.get(value, ()))

    def optimize(self, optimizer: IROptimizing) -> "IRGraph":
        """Return a graph that means the same and should cost less; this one doesn't change."""
        return optimizer.optimize(self)

    def _index(self) -> None:
        for index, node in enumerate(self._nodes):
            node.check()
            for value in node.outputs:
                if value in self._givers:
                    first = self._nodes[self._givers[value]].describe()
                    raise IRError(f"%{value} is given twice, by {first} and by {node.describe()}")
                self._givers[value] = index
            if len(set(node.inputs)) != len(node.inputs):
                raise IRError(f"{node.describe()}: it takes a value twice")
            for value in node.inputs:
                self._takers.setdefault(value, []).append(index)

    def _check_values(self) -> None:
        leaving = set(self._results)
        for value, takers in self._takers.items():
            if value not in self._givers:
                raise IRError(f"{self._nodes[takers[0]].describe()} takes %{value}, which no node gives")
            consuming = [index for index in takers if self._nodes[index].node_type in CONSUMING]
            if len(consuming) > 1:
                first, second = (self._nodes[index].describe() for index in consuming[:2])
                raise IRError(f"%{value} is used up twice, by {first} and by {second}")
            if consuming and value in leaving:
                raise IRError(f"%{value} is a result and used up by {self._nodes[consuming[0]].describe()}")
        if len(leaving) != len(self._results):
            raise IRError("results: a value is named twice")
        for value in self._results:
            if value not in self._givers:
                raise IRError(f"results: %{value[:MOST_SHOWN]} is given by no node")
        for value, giver in self._givers.items():
            if value not in self._takers and value not in leaving:
                raise IRError(
                    f"%{value} dangles: {self._nodes[giver].describe()} gives it, nothing takes it and it is no result"
                )


def _all_of(what: str, given: Iterable[_T], kind: type) -> tuple[_T, ...]:
    """Return what a graph is made of, in its order; raises ``IRError`` for what is none of that."""
    try:
        found = tuple(given)
    except TypeError:
        raise IRError(f"{what}: {shown(given)} is no sequence") from None
    for each in found:
        if not isinstance(each, kind):
            raise IRError(f"{what}: {shown(each)} is no {kind.__name__}")
    return found
