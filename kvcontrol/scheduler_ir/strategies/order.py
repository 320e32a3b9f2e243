"""What the strategies are made of: a line sorted by rank, kept while requests come and go.

A strategy gives each request a rank when it comes (lower goes first; equal ones in the order of arrival) and may change
it later, request by request.
"""

from collections.abc import Iterator
from typing import ClassVar, Protocol

from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.line import Line

Place = tuple[float, float, int, WaitingRequest]
"""Rank, arrival, number of coming, and the request; numbers differ, so that requests are never compared."""


Arrival = tuple[float, int, WaitingRequest]
"""Arrival, number of coming, and the request."""


class Order(Protocol):
    """An order without ageing, which an ``AgedQueue`` adds. It is told of each request once and never asked whether it
    knows one.
    """

    name: ClassVar[str]

    @property
    def state(self) -> str:
        """What a strategy that chooses between orders follows now; empty for the others."""
        ...

    def add(self, request: WaitingRequest, number: int) -> None:
        """Take in a request; ``number`` is larger than all before."""
        ...

    def remove(self, request: WaitingRequest) -> None:
        """Take out one that leaves without its turn."""
        ...

    def start(self, request: WaitingRequest, now_s: float) -> None:
        """Take out one that goes on now."""
        ...

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        """Give those that arrived after ``after_s``, in order; no more than ``most`` will be asked for."""
        ...

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other."""
        ...


class RankedOrder:
    """An ``Order`` without a rank: who subclasses it says ``_rank``, and may say more.

    All calls are O(log n) (see ``Line``), ``following`` is O(what is asked for), plus what a strategy says.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._places: dict[WaitingId, Place] = {}
        self._line: Line[Place] = Line()

    def _rank(self, request: WaitingRequest) -> float:
        """Return where a request that comes now belongs."""
        raise NotImplementedError

    def _left(self, request: WaitingRequest) -> None:
        """Note that a request has left, for whatever reason."""

    def _started(self, request: WaitingRequest) -> None:
        """Note that a request that has left goes on now."""

    @property
    def state(self) -> str:
        return ""

    def add(self, request: WaitingRequest, number: int) -> None:
        place = self._places[request.request_id] = (self._rank(request), request.arrived_s, number, request)
        self._line.add(place)

    def remove(self, request: WaitingRequest) -> None:
        self._line.remove(self._places.pop(request.request_id))
        self._left(request)

    def start(self, request: WaitingRequest, now_s: float) -> None:
        del now_s
        self.remove(request)
        self._started(request)

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        del most, now_s, view
        return (place[3] for place in self._line if place[1] > after_s)

    def check_integrity(self) -> None:
        self._line.check_integrity()
        if sorted(self._places.values()) != list(self._line):
            raise AssertionError(f"the line of {self.name} is out of order or not whole")

    def _move(self, request_id: WaitingId, rank: float) -> None:
        """Give a request that waits another rank."""
        place = self._places[request_id]
        self._line.remove(place)
        place = self._places[request_id] = (rank, *place[1:])
        self._line.add(place)


__all__ = ["Arrival", "Order", "Place", "RankedOrder"]
