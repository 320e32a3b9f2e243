"""The plans that requests are being served by, and how the last ones ended: ``ExecutorAPI`` for an operator.

A gateway's plan is carried out inside its request: it begins when it is made and ends with the answer, its client's
leaving or the request's time. So there is no queue here and no worker: whoever serves the request says how far it is,
and cancelling a plan ends the request, at the engine too. Steps are the plan's calls (``legs``). A request whose first
plan fails goes on with another one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from gateway.errors import PlanCancelledError
from kvcontrol.scheduler_ir import ExecutionPlan, IRError, LegKind, PlanId, PlanState, PlanStatus

_KEPT: Final = 1024
_LEFT: Final = "its client left, or its time was over"

EndRequest = Callable[[str], None]
"""Ends a request, with the reason."""


class PlanRun:
    """One plan while it is carried out; ``with`` ends it."""

    __slots__ = ("_end", "_over", "done", "plan", "reason", "state")

    def __init__(self, plan: ExecutionPlan, over: "Callable[[PlanRun], None]") -> None:
        self.plan = plan
        self.state = PlanState.QUEUED
        self.done = 0
        self.reason = ""
        self._end: EndRequest | None = None
        self._over = over

    def begin(self, end: EndRequest) -> None:
        """Note that it runs, and how its request is ended."""
        self._end = end
        self.state = PlanState.RUNNING

    def prepared(self) -> None:
        """All calls before the answer are done; a handover is when the answer begins: who answers fetches then."""
        self.done = sum(leg.kind is not LegKind.HANDOVER for leg in self.plan.before_answer)

    def began(self) -> None:
        """Record the begin of the answer: earlier calls are done."""
        self.done = len(self.plan.before_answer)

    def failed(self, reason: str) -> None:
        """It ended without a whole answer."""
        self._final(PlanState.FAILED, reason)

    def cancel(self, reason: str) -> None:
        """End it, unless it is over; one that runs is over when its request has let go of all that it holds."""
        if self.state.final:
            return
        self._final(PlanState.CANCELLED, reason)
        if self._end is None:
            self._over(self)
        else:
            self._end(reason)

    @property
    def status(self) -> PlanStatus:
        return PlanStatus(
            plan_id=self.plan.plan_id,
            state=self.state,
            done=self.done,
            steps=len(self.plan.legs),
            reason=self.reason,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del traceback
        if kind is None:
            self._final(PlanState.DONE, "")
        elif issubclass(kind, asyncio.CancelledError):
            self._final(PlanState.CANCELLED, _LEFT)
        else:
            self._final(PlanState.FAILED, str(error))
        self._end = None  # else the request would be kept as long as its plan
        self._over(self)

    def _final(self, state: PlanState, reason: str) -> None:
        if not self.state.final:
            self.state, self.reason = state, reason
            if state is PlanState.DONE:
                self.done = len(self.plan.legs)


class RunningPlans:
    """See the module's text, and ``ExecutorAPI``. O(1) a call; the last thousand that are over are remembered."""

    def __init__(self, *, kept: int = _KEPT) -> None:
        self._kept = kept
        self._runs: dict[PlanId, PlanRun] = {}
        self._past: OrderedDict[PlanId, PlanRun] = OrderedDict()

    def begin(self, plan: ExecutionPlan, end: EndRequest) -> PlanRun:
        """Begin a plan, submitted before or not; its caller carries it out. Raises ``PlanCancelledError`` when it was
        cancelled in between, and ``IRError`` when it has begun before.
        """
        run = self._runs.get(plan.plan_id) or self._past.get(plan.plan_id) or self._submit(plan)
        if run.state is PlanState.CANCELLED:
            raise PlanCancelledError(run.reason)
        if run.state is not PlanState.QUEUED:
            raise _used(plan)
        run.begin(end)
        return run

    def submit_plan(self, plan: ExecutionPlan) -> PlanStatus:
        """See ``ExecutorAPI``; it stays queued until its request begins it."""
        if plan.plan_id in self._runs or plan.plan_id in self._past:
            raise _used(plan)
        return self._submit(plan).status

    def cancel(self, plan_id: PlanId, reason: str) -> PlanStatus:
        """See ``ExecutorAPI``."""
        run = self._run(plan_id)
        run.cancel(reason)
        return run.status

    def status(self, plan_id: PlanId) -> PlanStatus:
        """See ``ExecutorAPI``."""
        return self._run(plan_id).status

    def knows(self, plan_id: PlanId) -> bool:
        """Whether it runs, or is one of the last that are over."""
        return plan_id in self._runs or plan_id in self._past

    def plan(self, plan_id: PlanId) -> ExecutionPlan:
        """Return a plan that is known; raises ``KeyError``."""
        return self._run(plan_id).plan

    def running(self) -> list[PlanRun]:
        """Return the plans that are not over, the oldest first."""
        return list(self._runs.values())

    def _run(self, plan_id: PlanId) -> PlanRun:
        return self._runs.get(plan_id) or self._past[plan_id]

    def _submit(self, plan: ExecutionPlan) -> PlanRun:
        run = self._runs[plan.plan_id] = PlanRun(plan, self._over)
        return run

    def _over(self, run: PlanRun) -> None:
        plan_id = run.plan.plan_id
        del self._runs[plan_id]
        self._past[plan_id] = run
        if len(self._past) > self._kept:
            self._past.popitem(last=False)


def _used(plan: ExecutionPlan) -> IRError:
    return IRError(f"plan {plan.plan_id!r} was submitted before; an id is used once")
