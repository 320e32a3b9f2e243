"""The most important class first, and within a class by arrival.

    rank = -priority

Strict: a request of a higher class passes all of the lower ones, however many wait, as long as none of those has waited
``ageing_bound_s``. Past that age a request belongs to no class any more: the aged go first, in the order of their
arrival, so a flood of important requests delays the others by the bound and not for ever.

Source: fixed-priority queueing (Cobham, Operations Research 2, 1954) with ageing (Silberschatz, Operating System
Concepts, 5.3.4).
"""

from bisect import insort
from collections.abc import Iterator
from itertools import chain
from math import inf
from operator import itemgetter
from typing import ClassVar

from kvcontrol.scheduler_ir.strategies.arrivals import Arrivals
from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingRequest
from kvcontrol.scheduler_ir.strategies.order import Arrival

_request_of = itemgetter(2)


class PriorityOrder:
    """A line by arrival for each class that anybody waits in. All calls are O(1) but for the first of a class."""

    name: ClassVar[str] = "priority"

    def __init__(self) -> None:
        self._ranks: list[int] = []
        self._lines: dict[int, Arrivals[Arrival]] = {}

    @property
    def state(self) -> str:
        return ""

    def add(self, request: WaitingRequest, number: int) -> None:
        rank = -request.priority
        line = self._lines.get(rank)
        if line is None:
            line = self._lines[rank] = Arrivals()
            insort(self._ranks, rank)
        line.add(request.request_id, (request.arrived_s, number, request))

    def remove(self, request: WaitingRequest) -> None:
        rank = -request.priority
        line = self._lines[rank]
        line.remove(request.request_id)
        if not line:
            del self._lines[rank]
            self._ranks.remove(rank)

    def start(self, request: WaitingRequest, now_s: float) -> None:
        del now_s
        self.remove(request)

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        del most, now_s, view
        if after_s == -inf:
            return map(_request_of, chain.from_iterable(map(self._lines.__getitem__, self._ranks)))
        return self._younger(after_s)

    def _younger(self, after_s: float) -> Iterator[WaitingRequest]:
        for rank in self._ranks:
            for arrival in self._lines[rank]:
                if arrival[0] > after_s:
                    yield arrival[2]

    def check_integrity(self) -> None:
        for line in self._lines.values():
            line.check_integrity()
        if sorted(self._lines) != self._ranks or not all(map(len, self._lines.values())):
            raise AssertionError("the classes of priority are out of order or not whole")
