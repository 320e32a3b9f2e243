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

from dataclasses import dataclass

from kvcontrol.scheduler_ir.strategies.base import WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.order import RankedOrder

_Key = tuple[str, int]


@dataclass(slots=True)
class _Group:
    number: int
    joined: int = 0
    waiting: int = 0


class AegaeonOrder(RankedOrder):
    """By group."""

    name = "aegaeon"

    def __init__(self, *, group_size: int = 8) -> None:
        super().__init__()
        self._group_size = group_size
        self._open: dict[_Key, _Group] = {}
        self._groups: dict[WaitingId, _Group] = {}
        self._numbers = 0

    def _rank(self, request: WaitingRequest) -> float:
        key = (request.model, request.prefix)
        group = self._open.get(key)
        if group is None:
            self._numbers += 1
            group = self._open[key] = _Group(self._numbers)
        group.joined += 1
        group.waiting += 1
        if group.joined >= self._group_size:
            del self._open[key]
        self._groups[request.request_id] = group
        return float(group.number)

    def _left(self, request: WaitingRequest) -> None:
        group = self._groups.pop(request.request_id)
        group.waiting -= 1
        key = (request.model, request.prefix)
        if not group.waiting and self._open.get(key) is group:
            del self._open[key]


__all__ = ["AegaeonOrder"]
