"""The queue around every order: who waits, and that nobody waits for ever.

The aged go first: requests that have waited ``ageing_bound_s``, in the order of their arrival. Behind them the order
decides. That is in one place, so that no strategy can starve anybody, lose anybody or serve anybody twice.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf, isfinite
from typing import Final

from kvcontrol.scheduler_ir.strategies.arrivals import Arrivals
from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.order import Order

DEFAULT_AGEING_BOUND_S: Final = 60.0

_Arrival = tuple[float, int, WaitingRequest]
_NOTHING_KNOWN: Final = EngineView()


class AgedQueue:
    """The ``WaitingQueue`` of an order.

    ``add``, ``remove``, ``start`` are O(1) (see ``Arrivals``); ``peek`` is O(what it returns); both plus the order's.
    """

    def __init__(self, order: Order, *, ageing_bound_s: float = DEFAULT_AGEING_BOUND_S) -> None:
        if not (isfinite(ageing_bound_s) and ageing_bound_s > 0):
            raise ValueError(f"ageing_bound_s is {ageing_bound_s}; allowed is a number of seconds above 0")
        self._order = order
        self._ageing_bound_s = ageing_bound_s
        self._arrivals: Arrivals[_Arrival] = Arrivals()
        self._number = 0
        self._promotions = 0

    @property
    def name(self) -> str:
        return self._order.name

    @property
    def ageing_bound_s(self) -> float:
        return self._ageing_bound_s

    @property
    def promotions(self) -> int:
        return self._promotions

    @property
    def state(self) -> str:
        return self._order.state

    @property
    def oldest_s(self) -> float | None:
        first = self._arrivals.first
        return None if first is None else first[0]

    def add(self, request: WaitingRequest) -> None:
        request_id, arrived_s, deadline_s = request.request_id, request.arrived_s, request.deadline_s
        if request_id in self._arrivals:
            raise ValueError(f"request {request_id} waits already")
        if not isfinite(arrived_s) or (deadline_s is not None and not isfinite(deadline_s)):
            raise ValueError(f"request {request_id} has a time that is no number")
        if request.prefill_tokens < 0 or request.output_tokens < 0:
            raise ValueError(f"request {request_id} has less than no tokens")
        self._number = number = self._number + 1
        self._order.add(request, number)
        self._arrivals.add(request_id, (arrived_s, number, request))

    def remove(self, request_id: WaitingId) -> WaitingRequest:
        arrival = self._arrivals.remove(request_id)
        self._order.remove(arrival[2])
        return arrival[2]

    def start(self, request_id: WaitingId, now_s: float) -> WaitingRequest:
        arrival = self._arrivals.remove(request_id)
        self._promotions += arrival[0] <= now_s - self._ageing_bound_s
        self._order.start(arrival[2], now_s)
        return arrival[2]

    def take(self, most: int, now_s: float, view: EngineView = _NOTHING_KNOWN) -> list[WaitingRequest]:
        chosen = self.peek(most, now_s, view)
        for request in chosen:
            self.start(request.request_id, now_s)
        return chosen

    def peek(self, most: int, now_s: float, view: EngineView = _NOTHING_KNOWN) -> list[WaitingRequest]:
        if most <= 0:
            return []
        cutoff_s = now_s - self._ageing_bound_s
        first = self._arrivals.first
        if first is None or first[0] > cutoff_s:  # nobody has aged, as mostly
            return list(islice(self._order.following(most, -inf, now_s, view), most))
        chosen: list[WaitingRequest] = []
        for arrived_s, _, request in islice(self._arrivals, most):
            if arrived_s > cutoff_s:
                break
            chosen.append(request)
        if len(chosen) < most:
            most -= len(chosen)
            chosen += islice(self._order.following(most, cutoff_s, now_s, view), most)
        return chosen

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[WaitingRequest]:
        return (request for _, _, request in self._arrivals)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._arrivals

    def check_integrity(self) -> None:
        self._order.check_integrity()
        self._arrivals.check_integrity()
        found = {request.request_id for request in self._order.following(len(self), -inf, 0.0, _NOTHING_KNOWN)}
        if found != {request.request_id for request in self}:
            raise AssertionError(f"the order of {self.name} holds others than those that wait")
