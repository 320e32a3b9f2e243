"""Grouped first come, first served: the queueing rules of Aegaeon that one model can use.

    group    = up to ``group_size`` requests of one (model or adapter, prefix), joined in the order of their arrival
    rank     = number of the group; a group is numbered when its first request comes
    a group closes when it has been joined ``group_size`` times, and is forgotten when none of it waits

Aegaeon shares GPUs between models and pays for each switch, so its prefill side runs what needs the same model
together: a newcomer joins the last open group of its model, else opens one at the end of the line. The cap keeps a busy
model from holding the others up: before a request go the groups that were opened before its own, and no more.

In one LMDeploy engine there is one model. What has to be switched there is an adapter, and the cached prefix that the
next request needs in HBM; so those make a group. NOT here, as they need several models on one GPU: the token-level
weighted round robin of its decode side, preemptive model switching, and the choice of an instance (the gateway's).

Source: Xiang et al., "Aegaeon: Effective GPU Pooling for Concurrent LLM Serving on the Market", SOSP 2025, section 4.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.order import Arrival

_Key = tuple[str, int]


@dataclass(slots=True)
class _Group:
    number: int
    key: _Key
    joined: int = 0
    waiting: list[Arrival] = field(default_factory=list)


class AegaeonOrder:
    """By group. All calls are O(log ``group_size``), and move at most as many pointers."""

    name: ClassVar[str] = "aegaeon"

    def __init__(self, *, group_size: int = 8) -> None:
        self._group_size = group_size
        self._line: OrderedDict[int, _Group] = OrderedDict()
        self._open: dict[_Key, _Group] = {}
        self._places: dict[WaitingId, tuple[_Group, Arrival]] = {}
        self._numbers = 0

    @property
    def state(self) -> str:
        return ""

    def add(self, request: WaitingRequest, number: int) -> None:
        key = (request.model, request.prefix)
        group = self._open.get(key)
        if group is None:
            self._numbers += 1
            group = self._open[key] = self._line[self._numbers] = _Group(self._numbers, key)
        group.joined += 1
        if group.joined >= self._group_size:
            del self._open[key]
        arrival = (request.arrived_s, number, request)
        insort(group.waiting, arrival)
        self._places[request.request_id] = (group, arrival)

    def remove(self, request: WaitingRequest) -> None:
        group, arrival = self._places.pop(request.request_id)
        del group.waiting[bisect_left(group.waiting, arrival)]
        if not group.waiting:
            del self._line[group.number]
            if self._open.get(group.key) is group:
                del self._open[group.key]

    def start(self, request: WaitingRequest, now_s: float) -> None:
        del now_s
        self.remove(request)

    def following(self, most: int, after_s: float, now_s: float, view: EngineView) -> Iterator[WaitingRequest]:
        del most, now_s, view
        for group in self._line.values():
            for arrival in group.waiting:
                if arrival[0] > after_s:
                    yield arrival[2]

    def check_integrity(self) -> None:
        whole = [(group, arrival) for group in self._line.values() for arrival in group.waiting]
        if (
            sorted(self._line) != list(self._line)
            or len(whole) != len(self._places)
            or any(sorted(group.waiting) != group.waiting or not group.waiting for group in self._line.values())
            or any(self._places.get(arrival[2].request_id) != (group, arrival) for group, arrival in whole)
            or any(self._line.get(group.number) is not group for group in self._open.values())
        ):
            raise AssertionError("the groups of aegaeon are out of order or not whole")
