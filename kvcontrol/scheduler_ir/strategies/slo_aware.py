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
from contextlib import suppress
from itertools import chain
from math import inf, nextafter

from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.line import Line
from kvcontrol.scheduler_ir.strategies.order import Place, RankedOrder

_Due = tuple[float, WaitingId]
_MISSED = inf
"""The rank of what is late for good: behind all that have one, by arrival."""


class SloAwareOrder(RankedOrder):
    """By deadline."""

    name = "slo_aware"

    def __init__(self, *, patience_s: float = 10.0) -> None:
        super().__init__()
        self._patience_s = patience_s
        self._due: Line[_Due] = Line()  # the deadlines that are not known to be missed

    def nearest_after(self, now_s: float) -> float | None:
        """Return the earliest deadline that is still to come; None where there is none."""
        nearest = next(self._due.from_item((nextafter(now_s, inf),)), None)
        return None if nearest is None else nearest[0]

    def _rank(self, request: WaitingRequest) -> float:
        if request.deadline_s is None:
            return request.arrived_s + self._patience_s
        self._due.add((request.deadline_s, request.request_id))
        return request.deadline_s

    def _left(self, request: WaitingRequest) -> None:
        if request.deadline_s is not None:
            with suppress(KeyError):  # its deadline is over
                self._due.remove((request.deadline_s, request.request_id))

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        self._set_aside(now_s)
        late: list[Place] = []
        found = 0
        line = iter(self._line)
        for place in line:
            if place[1] <= after_s:
                continue
            if place[0] == _MISSED:
                # All from here on are late for good; the few that are late by their length alone belong among them.
                rest = (each for each in chain((place,), line) if each[1] > after_s)
                yield from _by_arrival(late, rest)
                return
            if _is_late(place[3], now_s, view):
                insort(late, place, key=_arrival)
                continue
            yield place[3]
            found += 1
            if found >= most:
                return
        for place in late:
            yield place[3]

    def _set_aside(self, now_s: float) -> None:
        """Give those whose deadline is over the last rank: once for each, whatever the engine's speed."""
        while self._due and (first := self._due.first)[0] <= now_s:
            self._due.remove(first)
            self._move(first[1], _MISSED)


def _is_late(request: WaitingRequest, now_s: float, view: EngineView) -> bool:
    if request.deadline_s is None:
        return False
    speed = view.prefill_tokens_per_s
    return request.deadline_s <= now_s + (request.prefill_tokens / speed if speed > 0 else 0.0)


def _arrival(place: Place) -> tuple[float, int]:
    return place[1], place[2]


def _by_arrival(few: list[Place], line: Iterator[Place]) -> Iterator[WaitingRequest]:
    """Merge a sorted list into a sorted line; lazily, as the line may be long."""
    waiting = iter(few)
    next_few = next(waiting, None)
    for place in line:
        while next_few is not None and _arrival(next_few) < _arrival(place):
            yield next_few[3]
            next_few = next(waiting, None)
        yield place[3]
    if next_few is not None:
        for place in chain((next_few,), waiting):
            yield place[3]


__all__ = ["SloAwareOrder"]
