"""The simplest executor of plans: step by step, with a runner that carries out single steps."""

from typing import Protocol

from kvcontrol.core.shown import shown
from kvcontrol.scheduler_ir.executor import PlanState, PlanStatus
from kvcontrol.scheduler_ir.nodes import IRError, IRNode
from kvcontrol.scheduler_ir.plan import ExecutionPlan, PlanId


class StepExecutor:
    """Runs plans, the oldest first, one step at each call of ``advance``. The runner carries out a step; an ``IRError``
    of the runner fails the plan. A plan that ends early is passed to the runner's ``release``.
    """

    def __init__(self, run: "StepRunner") -> None:
        self._runner = run
        self._statuses: dict[PlanId, PlanStatus] = {}
        self._left: dict[PlanId, list[IRNode]] = {}

    def submit_plan(self, plan: ExecutionPlan) -> PlanStatus:
        """See ``ExecutorAPI``."""
        if plan.plan_id in self._statuses:
            raise IRError(f"plan {shown(plan.plan_id)} was submitted before; an id is used once")
        steps = list(plan.ir_graph.topological_order())
        self._left[plan.plan_id] = steps[::-1]
        return self._set(PlanStatus(plan_id=plan.plan_id, state=PlanState.QUEUED, done=0, steps=len(steps)))

    def cancel(self, plan_id: PlanId, reason: str) -> PlanStatus:
        """See ``ExecutorAPI``."""
        status = self._statuses[plan_id]
        return status if status.state.final else self._end(status, PlanState.CANCELLED, reason)

    def status(self, plan_id: PlanId) -> PlanStatus:
        """See ``ExecutorAPI``."""
        return self._statuses[plan_id]

    def advance(self) -> PlanStatus | None:
        """Run the next step of the oldest plan that isn't final; None when there is none."""
        plan_id = next(iter(self._left), None)
        if plan_id is None:
            return None
        status, left = self._statuses[plan_id], self._left[plan_id]
        if left:
            try:
                self._runner.step(plan_id, left[-1])
            except IRError as error:
                return self._end(status, PlanState.FAILED, str(error))
            left.pop()
        done = status.steps - len(left)
        if left:
            return self._set(PlanStatus(plan_id=plan_id, state=PlanState.RUNNING, done=done, steps=status.steps))
        del self._left[plan_id]
        return self._set(PlanStatus(plan_id=plan_id, state=PlanState.DONE, done=done, steps=status.steps))

    def _end(self, status: PlanStatus, state: PlanState, reason: str) -> PlanStatus:
        del self._left[status.plan_id]
        self._runner.release(status.plan_id)
        return self._set(
            PlanStatus(plan_id=status.plan_id, state=state, done=status.done, steps=status.steps, reason=reason)
        )

    def _set(self, status: PlanStatus) -> PlanStatus:
        self._statuses[status.plan_id] = status
        return status


class StepRunner(Protocol):
    """What carries out single steps."""

    def step(self, plan_id: PlanId, node: IRNode) -> None:
        """Carry out one step; raises ``IRError`` when it can't be."""
        ...

    def release(self, plan_id: PlanId) -> None:
        """Give back what a plan that ended early holds."""
        ...
