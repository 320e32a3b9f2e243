"""First come, first served: what LMDeploy does, and what every other strategy is compared with.

    rank = arrival

Nobody is passed, so nobody ages. It is the fairest to requests and the unfairest to short and urgent ones: one burst of
long prompts holds up whoever comes behind it.

Source: Erlang's queue; in LLM serving Orca (Yu et al., OSDI 2022, section 4.1: "iteration-level first-come-first-
served").
"""

from collections.abc import Iterator
from typing import ClassVar

from kvcontrol.scheduler_ir.strategies.arrivals import Arrivals
from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingRequest
from kvcontrol.scheduler_ir.strategies.order import Arrival


class FifoOrder:
    """By arrival. All calls are O(1), ``following`` is O(what is asked for and what has aged)."""

    name: ClassVar[str] = "fifo"

    def __init__(self) -> None:
        self._line: Arrivals[Arrival] = Arrivals()

    @property
    def state(self) -> str:
        return ""

    def add(self, request: WaitingRequest, number: int) -> None:
        self._line.add(request.request_id, (request.arrived_s, number, request))

    def remove(self, request: WaitingRequest) -> None:
        self._line.remove(request.request_id)

    def start(self, request: WaitingRequest, now_s: float) -> None:
        del now_s
        self._line.remove(request.request_id)

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        del most, now_s, view
        return (arrival[2] for arrival in self._line if arrival[0] > after_s)

    def check_integrity(self) -> None:
        self._line.check_integrity()
