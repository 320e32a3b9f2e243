"""Who of those that wait goes next: six orders behind one contract, swapped without losing anybody."""

from kvcontrol.scheduler_ir.strategies.aged import DEFAULT_AGEING_BOUND_S, AgedQueue
from kvcontrol.scheduler_ir.strategies.base import (
    EngineView,
    WaitingId,
    WaitingQueue,
    WaitingRequest,
    hand_over,
)
from kvcontrol.scheduler_ir.strategies.registry import DEFAULT_STRATEGY, STRATEGIES, make_strategy

__all__ = [
    "DEFAULT_AGEING_BOUND_S",
    "DEFAULT_STRATEGY",
    "STRATEGIES",
    "AgedQueue",
    "EngineView",
    "WaitingId",
    "WaitingQueue",
    "WaitingRequest",
    "hand_over",
    "make_strategy",
]
