"""The KV of a request's tokens on one device, as a value of a graph, and names for new values."""

from dataclasses import dataclass

from kvcontrol.scheduler_ir.graph import IRGraph
from kvcontrol.scheduler_ir.nodes import Device, ValueName


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpan:
    """The KV of tokens ``[start, end)`` of one request on one device, under the name of its value."""

    name: ValueName
    request: str
    device: Device
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


class Namer:
    """Gives names that a graph doesn't have yet."""

    def __init__(self, graph: IRGraph) -> None:
        self._taken = {value for node in graph.nodes for value in node.outputs}

    def fresh(self, base: str) -> ValueName:
        """Return ``base``, or with a number after it, and keep it."""
        name, number = ValueName(base), 0
        while name in self._taken:
            number += 1
            name = ValueName(f"{base}.{number}")
        self._taken.add(name)
        return name
