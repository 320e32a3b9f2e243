"""Follows one of three orders, by what is measured: how fast the queue drains, and how many deadlines are missed.

    drain_s = requests that wait * measured seconds from one start to the next
    calm      no deadline is nearer than drain_s                        -> priority
    pressed   one is: the order decides who makes it                    -> slo_aware
    drowning  more than half of the last starts with a deadline missed  -> hybrid

While everything will be in time, classes decide. When time gets short, deadlines do. When most are missed anyway, no
order saves them, and what helps is to start what matters most and costs least. The state is judged when a request
starts, at most once in ``dwell_s``, so that it doesn't flutter; shares fade by an eighth with each start.

All three orders are kept at once, so following another one is a pointer: three lines to keep, and no
step at which ten thousand requests are sorted anew, or found to have missed their deadlines.

Source: switching between policies at measured thresholds as in self-tuning dynP (Streit, JSSPP 2002); the thresholds
are ours.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import ClassVar

from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingRequest
from kvcontrol.scheduler_ir.strategies.hybrid import HybridOrder
from kvcontrol.scheduler_ir.strategies.order import Order
from kvcontrol.scheduler_ir.strategies.priority import PriorityOrder
from kvcontrol.scheduler_ir.strategies.slo_aware import SloAwareOrder

_MEMORY = 1 / 8
_MISSED_AT_MOST = 0.5


class State(StrEnum):
    """How the queue is."""

    CALM = "calm"
    PRESSED = "pressed"
    DROWNING = "drowning"


class AdaptiveOrder:
    """By whatever fits the queue's state."""

    name: ClassVar[str] = "adaptive"

    def __init__(self, *, dwell_s: float = 2.0) -> None:
        self._dwell_s = dwell_s
        self._deadlines = SloAwareOrder()
        self._orders: dict[State, Order] = {
            State.CALM: PriorityOrder(),
            State.PRESSED: self._deadlines,
            State.DROWNING: HybridOrder(),
        }
        self._all = tuple(self._orders.values())
        self._followed = State.CALM
        self._waiting = 0
        self._evaluated_s: float | None = None
        self._started_s: float | None = None
        self._gap_s = 0.0
        self._missed = 0.0

    @property
    def state(self) -> str:
        return f"{self._followed}: {self._orders[self._followed].name}"

    def add(self, request: WaitingRequest, number: int) -> None:
        self._waiting += 1
        for order in self._all:
            order.add(request, number)

    def remove(self, request: WaitingRequest) -> None:
        self._waiting -= 1
        for order in self._all:
            order.remove(request)

    def start(self, request: WaitingRequest, now_s: float) -> None:
        self._waiting -= 1
        for order in self._all:
            order.start(request, now_s)
        self._deadlines.keep_up(now_s)
        self._measure(request, now_s)

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        self._deadlines.keep_up(now_s)
        return self._orders[self._followed].following(most, after_s, now_s, view)

    def check_integrity(self) -> None:
        for order in self._all:
            order.check_integrity()

    def _measure(self, request: WaitingRequest, now_s: float) -> None:
        if self._started_s is not None and self._waiting:
            self._gap_s += _MEMORY * (now_s - self._started_s - self._gap_s)
        self._started_s = now_s
        if request.deadline_s is not None:
            self._missed += _MEMORY * ((request.deadline_s < now_s) - self._missed)
        if self._evaluated_s is None or now_s - self._evaluated_s >= self._dwell_s:
            self._evaluated_s = now_s
            self._followed = self._evaluate(now_s)

    def _evaluate(self, now_s: float) -> State:
        if self._missed > _MISSED_AT_MOST:
            return State.DROWNING
        nearest_s = self._deadlines.nearest_after(now_s)
        if nearest_s is not None and now_s + self._waiting * self._gap_s >= nearest_s:
            return State.PRESSED
        return State.CALM
