"""The most important class first; within a class by arrival, and what has little left to compute earlier.

    class    strict
    rank     arrival + prefill_weight_s * uncached prompt tokens / 1000      within a class

Strict: a request of a higher class passes all of the lower ones, however many wait, as long as none of those has waited
``ageing_bound_s``. Past that age a request belongs to no class any more: the aged go first, in the order of their
arrival, so a flood of important requests delays the others by the bound and not for ever.

Within a class the rank is shortest prefill first with linear ageing: a conversation's next turn, whose history is
cached, passes a cold prompt, but only if it came no later than ``prefill_weight_s`` for each 1,000 tokens that the cold
prompt has more. A weight of 0 is first come, first served.

Source: fixed-priority queueing (Cobham, Operations Research 2, 1954) with ageing (Silberschatz, Operating System
Concepts, 5.3.4); shortest processing time first (Smith, Naval Research Logistics Quarterly 3, 1956), of which serving
the longest cached prefix first is the cached half (Zheng et al., NeurIPS 2024, section 3).
"""

from bisect import insort
from collections.abc import Iterator
from itertools import chain
from math import inf
from operator import itemgetter
from typing import ClassVar, Final

from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.ladder import Ladder, Place

DEFAULT_PREFILL_WEIGHT_S: Final = 0.25
"""About four times as long as one GPU takes to compute 1,000 tokens of a 7B model."""
_request_of = itemgetter(3)


class PriorityOrder:
    """A line by rank for each class that anybody waits in. Calls cost what the ``Ladder``'s do."""

    name: ClassVar[str] = "priority"

    def __init__(self, *, prefill_weight_s: float = DEFAULT_PREFILL_WEIGHT_S) -> None:
        self._token_s = prefill_weight_s / 1000
        self._classes: list[int] = []
        self._lines: dict[int, Ladder] = {}
        self._places: dict[WaitingId, Place] = {}

    @property
    def state(self) -> str:
        return ""

    def add(self, request: WaitingRequest, number: int) -> None:
        line = self._lines.get(-request.priority)
        if line is None:
            line = self._lines[-request.priority] = Ladder()
            insort(self._classes, -request.priority)
        rank_s = request.arrived_s + self._token_s * request.prefill_tokens
        place = self._places[request.request_id] = (rank_s, request.arrived_s, number, request)
        line.add(place)

    def remove(self, request: WaitingRequest) -> None:
        line = self._lines[-request.priority]
        line.remove(self._places.pop(request.request_id))
        if not line:
            del self._lines[-request.priority]
            self._classes.remove(-request.priority)

    def start(self, request: WaitingRequest, now_s: float) -> None:
        del now_s
        self.remove(request)

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        del most, now_s, view
        line = chain.from_iterable(map(self._lines.__getitem__, self._classes))
        if after_s == -inf:
            return map(_request_of, line)
        return (place[3] for place in line if place[1] > after_s)

    def check_integrity(self) -> None:
        for line in self._lines.values():
            line.check_integrity()
        places = [place for line in self._lines.values() for place in line]
        if sorted(self._lines) != self._classes or sorted(places) != sorted(self._places.values()):
            raise AssertionError("the classes of priority are out of order or not whole")
        if not all(map(len, self._lines.values())):
            raise AssertionError("a class of priority is empty")
