"""Requests that wait for an admission slot at the instances of one model."""

import asyncio
from collections.abc import Sequence
from enum import Enum, auto
from math import ceil
from typing import Final

from gateway.admission.fair_queue import FairQueue, Waiting
from gateway.admission.slot import AdmissionRequest

_RATE_MEMORY: Final = 0.1
LONGEST_RETRY_S: Final = 60


class WaitResult(Enum):
    """How the wait of a request ends."""

    ADMITTED = auto()
    PUSHED_OUT = auto()
    NO_INSTANCE = auto()


class ModelQueue:
    """``unplaced`` counts the places of admitted requests for which no instance has been chosen yet; ``awaiting_trial``
    are the requests that came while all instances depended on the outcome of a trial.
    """

    def __init__(self, *, bound: int, ageing_s: float) -> None:
        self.queue = FairQueue(bound=bound, ageing_s=ageing_s)
        self.waiters: dict[Waiting, asyncio.Future[WaitResult]] = {}
        self.awaiting_trial: set[Waiting] = set()
        self.unplaced = 0
        self._last_s = 0.0
        self._seconds_per_slot = 0.0

    def placed(self, places: int) -> None:
        """Note that so many unplaced places count at an instance now, or have ended."""
        self.unplaced -= places

    def retry_after_s(self) -> int:
        """Return how long the present queue will take, as fast as it went lately."""
        return max(1, min(LONGEST_RETRY_S, ceil(self._seconds_per_slot * len(self.queue))))

    def admit_at_once(self, request: AdmissionRequest, now_s: float) -> None:
        """Admit a request that finds room while no other one waits."""
        self.queue.let_in(request.tenant.id, request.tenant.limits.weight, request.work)
        self.unplaced += request.answers
        self._count(now_s)

    def push(self, request: AdmissionRequest, now_s: float) -> Waiting | None:
        """Queue a request; return None for one that finds the queue full of requests with at least its claim. Another
        one that has the least claim is pushed out for it.
        """
        limits = request.tenant.limits
        waiting = Waiting(
            tenant=request.tenant.id,
            weight=limits.weight,
            priority=limits.priority,
            work=request.work,
            places=request.answers,
            arrived_s=now_s,
        )
        loser = self.queue.push(waiting)
        if loser is waiting:
            return None
        if loser is not None and not (waiter := self.waiters.pop(loser)).done():
            waiter.set_result(WaitResult.PUSHED_OUT)
        self.waiters[waiting] = asyncio.get_running_loop().create_future()
        return waiting

    def admit_next(self, now_s: float, has_slot: Sequence[bool]) -> bool:
        """Admit the next request, of a claim for which there is room; return False when there is none."""
        waiting = self.queue.pop(now_s, has_slot)
        if waiting is None:
            return False
        waiter = self.waiters.pop(waiting)
        if waiter.done():  # its deadline or its client's end came first; it is about to leave
            self.queue.correct(waiting.tenant, waiting.weight, -waiting.work)
        else:
            waiting.granted = True
            self.unplaced += waiting.places
            self._count(now_s)
            waiter.set_result(WaitResult.ADMITTED)
        return True

    def leave(self, waiting: Waiting) -> bool:
        """Forget a request that no longer waits; return whether that frees a slot which it had just been given."""
        if self.waiters.pop(waiting, None) is not None:
            self.queue.remove(waiting)
            return False
        if not waiting.granted:
            return False
        self.unplaced -= waiting.places
        self.queue.correct(waiting.tenant, waiting.weight, -waiting.work)
        return True

    def end_waits_for_trial(self) -> None:
        """End the wait of every request that came for the outcome of a trial: the trial has failed."""
        for waiting in [each for each in self.awaiting_trial if each in self.waiters]:
            waiter = self.waiters.pop(waiting)
            self.queue.remove(waiting)
            if not waiter.done():
                waiter.set_result(WaitResult.NO_INSTANCE)
        self.awaiting_trial.clear()

    def _count(self, now_s: float) -> None:
        gap_s = min(now_s - self._last_s, float(LONGEST_RETRY_S)) if self._last_s else 0.0
        self._seconds_per_slot += _RATE_MEMORY * (gap_s - self._seconds_per_slot)
        self._last_s = now_s
