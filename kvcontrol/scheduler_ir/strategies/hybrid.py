"""Class, deadline and cached prefix in one sum of seconds: who is due first goes first.

    due  = min(deadline, arrived + patience_s) - class_s * priority
    rank = due - locality_s, where a request of the same prefix was started lately (it is among the last 64 prefixes)

A class is worth ``class_s`` seconds of waiting, so an ordinary request that has waited that long is level with a
newcomer of the class above; a deadline can only bring a request forward. When a request starts, its prefix is about to
be in HBM: the next two that share it gain ``locality_s``, and so do newcomers of that prefix, each once. That is
bounded in seconds, so a popular prefix can't take the queue over.

Source: the sum of slack and importance is the value-density idea of Jensen, Locke and Tokuda (RTSS 1985); following the
prefix that is cached is SGLang's cache-aware scheduling (Zheng et al., NeurIPS 2024, section 3) with a bound.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf
from operator import itemgetter
from typing import ClassVar, Final

from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.ladder import Ladder, Place

RECENT_PREFIXES: Final = 64
FOLLOWERS: Final = 2

_request_of = itemgetter(3)


class HybridOrder:
    """By the time when it is due. All calls but ``following`` are O(1) for those that aren't near the front (see
    ``Ladder``), and that is O(what is asked for).
    """

    name: ClassVar[str] = "hybrid"

    def __init__(self, *, patience_s: float = 10.0, class_s: float = 10.0, locality_s: float = 2.0) -> None:
        self._patience_s = patience_s
        self._class_s = class_s
        self._locality_s = locality_s
        self._line = Ladder()
        self._places: dict[WaitingId, Place] = {}
        self._recent: dict[int, None] = {}  # the oldest first
        self._apart: dict[int, dict[WaitingId, Place]] = {}  # by prefix: what hasn't gained yet, in order of coming

    @property
    def state(self) -> str:
        return ""

    def add(self, request: WaitingRequest, number: int) -> None:
        rank, prefix, deadline_s = request.arrived_s + self._patience_s, request.prefix, request.deadline_s
        if deadline_s is not None and deadline_s < rank:
            rank = deadline_s
        rank -= self._class_s * request.priority
        is_apart = prefix and prefix not in self._recent
        if prefix and not is_apart:
            rank -= self._locality_s
        place = self._places[request.request_id] = (rank, request.arrived_s, number, request)
        self._line.add(place)
        if is_apart:
            apart = self._apart.get(prefix)
            if apart is None:
                apart = self._apart[prefix] = {}
            apart[request.request_id] = place

    def remove(self, request: WaitingRequest) -> None:
        self._line.remove(self._places.pop(request.request_id))
        apart = self._apart.get(request.prefix)
        if apart is not None:
            apart.pop(request.request_id, None)
            if not apart:
                del self._apart[request.prefix]

    def start(self, request: WaitingRequest, now_s: float) -> None:
        del now_s
        self.remove(request)
        prefix = request.prefix
        if not prefix:
            return
        recent = self._recent
        recent.pop(prefix, None)
        recent[prefix] = None
        if len(recent) > RECENT_PREFIXES:
            del recent[next(iter(recent))]
        apart = self._apart.get(prefix)
        if apart is not None:
            self._bring_forward(apart)
            if not apart:
                del self._apart[prefix]

    def _bring_forward(self, apart: dict[WaitingId, Place]) -> None:
        """Let the next few of a prefix gain."""
        line, places = self._line, self._places
        for request_id, place in list(islice(apart.items(), FOLLOWERS)):
            del apart[request_id]
            line.remove(place)
            gained = places[request_id] = (place[0] - self._locality_s, *place[1:])
            line.add(gained)

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        del most, now_s, view
        if after_s == -inf:
            return map(_request_of, self._line)
        return (place[3] for place in self._line if place[1] > after_s)

    def check_integrity(self) -> None:
        self._line.check_integrity()
        apart = {request_id: place for places in self._apart.values() for request_id, place in places.items()}
        if (
            sorted(self._places.values()) != list(self._line)
            or not all(self._apart.values())
            or not apart.items() <= self._places.items()
        ):
            raise AssertionError("the line of hybrid is out of order or not whole")
