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

from itertools import islice
from typing import Final

from kvcontrol.scheduler_ir.strategies.base import WaitingId, WaitingRequest
from kvcontrol.scheduler_ir.strategies.order import RankedOrder

RECENT_PREFIXES: Final = 64
FOLLOWERS: Final = 2


class HybridOrder(RankedOrder):
    """By the time when it is due."""

    name = "hybrid"

    def __init__(self, *, patience_s: float = 10.0, class_s: float = 10.0, locality_s: float = 2.0) -> None:
        super().__init__()
        self._patience_s = patience_s
        self._class_s = class_s
        self._locality_s = locality_s
        self._recent: dict[int, None] = {}  # the oldest first
        self._apart: dict[int, dict[WaitingId, float]] = {}  # by prefix: what hasn't gained yet, with its due time

    def _rank(self, request: WaitingRequest) -> float:
        due_s = due(request, patience_s=self._patience_s, class_s=self._class_s)
        if not request.prefix:
            return due_s
        if request.prefix in self._recent:
            return due_s - self._locality_s
        self._apart.setdefault(request.prefix, {})[request.request_id] = due_s
        return due_s

    def _left(self, request: WaitingRequest) -> None:
        apart = self._apart.get(request.prefix)
        if apart is not None:
            apart.pop(request.request_id, None)
            if not apart:
                del self._apart[request.prefix]

    def _started(self, request: WaitingRequest) -> None:
        prefix = request.prefix
        if not prefix:
            return
        self._recent.pop(prefix, None)
        self._recent[prefix] = None
        if len(self._recent) > RECENT_PREFIXES:
            del self._recent[next(iter(self._recent))]
        apart = self._apart.get(prefix, {})
        for request_id, due_s in list(islice(apart.items(), FOLLOWERS)):
            del apart[request_id]
            self._move(request_id, due_s - self._locality_s)
        if not apart:
            self._apart.pop(prefix, None)


def due(request: WaitingRequest, *, patience_s: float, class_s: float) -> float:
    """Return when a request should start, in seconds on its queue's clock."""
    due_s = request.arrived_s + patience_s
    if request.deadline_s is not None:
        due_s = min(due_s, request.deadline_s)
    return due_s - class_s * request.priority


__all__ = ["FOLLOWERS", "RECENT_PREFIXES", "HybridOrder", "due"]
