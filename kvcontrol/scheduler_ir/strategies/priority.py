"""The most important class first, and within a class by arrival.

    rank = -priority

Strict: a request of a higher class passes all of the lower ones, however many wait, as long as none of those has waited
``ageing_bound_s``. Past that age a request belongs to no class any more: the aged go first, in the order of their
arrival, so a flood of important requests delays the others by the bound and not for ever.

Source: fixed-priority queueing (Cobham, Operations Research 2, 1954) with ageing (Silberschatz, Operating System
Concepts, 5.3.4).
"""

from kvcontrol.scheduler_ir.strategies.base import WaitingRequest
from kvcontrol.scheduler_ir.strategies.order import RankedOrder


class PriorityOrder(RankedOrder):
    """By class."""

    name = "priority"

    def _rank(self, request: WaitingRequest) -> float:
        return -float(request.priority)


__all__ = ["PriorityOrder"]
