"""Who of those that wait goes next."""

from kvcontrol.scheduler_ir.strategies.base import EngineView, WaitingId, WaitingQueue, WaitingRequest, hand_over

__all__ = ["EngineView", "WaitingId", "WaitingQueue", "WaitingRequest", "hand_over"]
