"""The contract of whoever carries out plans.

Submitting only takes a plan over; ``status`` returns how far it is. A gateway's executor is
``gateway/execution/running_plans.py``; ``lab/research/ir/executor.py`` runs plans step by step.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvcontrol.scheduler_ir.plan import ExecutionPlan, PlanId


class PlanState(StrEnum):
    """``QUEUED`` and ``RUNNING`` go on; the others are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in {PlanState.DONE, PlanState.FAILED, PlanState.CANCELLED}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus:
    """How far a plan is: ``done`` of its ``steps``, and why it failed or was cancelled, in words (empty otherwise)."""

    plan_id: PlanId
    state: PlanState
    done: int
    steps: int
    reason: str = ""


class ExecutorAPI(Protocol):
    """Takes plans over, one state for each."""

    def submit_plan(self, plan: ExecutionPlan) -> PlanStatus:
        """Take over a plan; raises ``IRError`` when one of that id is known already."""
        ...

    def cancel(self, plan_id: PlanId, reason: str) -> PlanStatus:
        """End a plan that is not final; what it holds is given back. A final one stays as it is. Raises ``KeyError``
        for an unknown id.
        """
        ...

    def status(self, plan_id: PlanId) -> PlanStatus:
        """Say how far a plan is; raises ``KeyError`` for an unknown id."""
        ...
