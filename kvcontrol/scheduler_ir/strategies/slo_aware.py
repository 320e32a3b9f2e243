"""The earliest deadline first, among those that can still be met.

    rank     = deadline; without one: arrival + patience_s
    hopeless = deadline <= now + prefill_tokens / (measured speed)      (speed unknown: prefill takes no time)
    order    = the others by rank, then the hopeless by arrival

Earliest deadline first meets all deadlines whenever any order can, and fails badly when none can: it spends its time on
whatever is about to be late, so that everything is. Therefore a request whose first token can't come in time any more
lets the others pass; it isn't dropped, and its age brings it back to the front. Classes count for nothing here.

Source: Liu and Layland, JACM 20(1), 1973 (EDF); Locke, 1986 (best-effort scheduling under overload); for LLM queues
QLM (Patke et al., SoCC 2024). Requests past their deadline are moved once, so a step costs O(log n) for each of them.
"""

from bisect import insort
from collections.abc import Iterator
from heapq import merge
from math import inf
from typing import ClassVar

from kvcontrol.scheduler_ir.strategies.arrivals import Arrivals
from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.ladder import Ladder, Place
from kvcontrol.scheduler_ir.strategies.line import Line
from kvcontrol.scheduler_ir.strategies.order import Arrival


class SloAwareOrder:
    """By deadline. Each request is in one of three lines: its deadline is ahead, or missed, or it has none."""

    name: ClassVar[str] = "slo_aware"

    def __init__(self, *, patience_s: float = 10.0) -> None:
        self._patience_s = patience_s
        self._due = Ladder()
        self._dues: dict[WaitingId, Place] = {}
        self._patient: Arrivals[Place] = Arrivals()
        self._missed: Line[Arrival] = Line()
        self._misses: dict[WaitingId, Arrival] = {}
        self._kept_s = -inf

    @property
    def state(self) -> str:
        return ""

    def nearest_after(self, now_s: float) -> float | None:
        """Return the earliest deadline that is still to come; None where there is none."""
        self.keep_up(now_s)
        nearest = self._due.first
        return None if nearest is None else nearest[0]

    def add(self, request: WaitingRequest, number: int) -> None:
        arrived_s, deadline_s = request.arrived_s, request.deadline_s
        if deadline_s is None:
            place = (arrived_s + self._patience_s, arrived_s, number, request)
            self._patient.add(request.request_id, place)
        else:
            place = self._dues[request.request_id] = (deadline_s, arrived_s, number, request)
            self._due.add(place)
            if deadline_s <= self._kept_s:
                self._kept_s = -inf

    def remove(self, request: WaitingRequest) -> None:
        request_id = request.request_id
        if request.deadline_s is None:
            self._patient.remove(request_id)
        elif (place := self._dues.pop(request_id, None)) is not None:
            self._due.remove(place)
        else:
            self._missed.remove(self._misses.pop(request_id))

    def start(self, request: WaitingRequest, now_s: float) -> None:
        del now_s
        self.remove(request)

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        self.keep_up(now_s)
        speed = view.prefill_tokens_per_s
        late: list[Arrival] = []
        found = 0
        for place in merge(self._due, self._patient) if len(self._patient) else self._due:
            rank_s, arrived_s, _, request = place
            if arrived_s <= after_s:
                continue
            # Nobody's deadline is over any more, so at an unknown speed all can be met.
            if speed > 0 and rank_s <= now_s + request.prefill_tokens / speed and request.deadline_s is not None:
                insort(late, place[1:])
                continue
            yield request
            found += 1
            if found >= most:
                return
        # The few that are late by their length alone belong among those that are late for good.
        for arrival in merge(late, self._missed) if late else self._missed:
            if arrival[0] > after_s:
                yield arrival[2]

    def keep_up(self, now_s: float) -> None:
        """Let those whose deadline is over wait behind the others, by arrival: once for each, whatever the engine's
        speed. Done with every look; who looks seldom may do it in between, so that no look has to do all of it.
        """
        if now_s <= self._kept_s:  # up to then nobody's is over
            return
        self._kept_s = now_s
        for place in self._due.pop_until(now_s):
            request_id = place[3].request_id
            del self._dues[request_id]
            arrival = self._misses[request_id] = place[1:]
            self._missed.add(arrival)

    def check_integrity(self) -> None:
        for line in (self._due, self._patient, self._missed):
            line.check_integrity()
        if sorted(self._dues.values()) != list(self._due) or sorted(self._misses.values()) != list(self._missed):
            raise AssertionError("the lines of slo_aware are out of order or not whole")
