import asyncio

import pytest

from gateway.errors import PlanCancelledError
from gateway.execution.running_plans import RunningPlans
from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import (
    Device,
    ExecutionPlan,
    ExecutorAPI,
    Handover,
    IRBuilder,
    IRError,
    IRRequest,
    Placement,
    PlanId,
    PlanState,
)
from lab.research.ir.legs import plan_of

P = PlanId("p")


def plan(name: str = "p") -> ExecutionPlan:
    handover = Handover(prefill=Device("p0"), transport=KVTransport.TIERS)
    placement = Placement(answer=Device("d0"), handover=handover)
    request = IRRequest(request_id="r", prompt_tokens=20, max_tokens=4, placement=placement)
    return plan_of(PlanId(name), IRBuilder().build([request]))


class Request:
    """One that notes why it is ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def end(self, reason: str) -> None:
        self.ended.append(reason)


def test_a_plan_runs_and_is_done_and_is_remembered() -> None:
    plans = RunningPlans()
    executor: ExecutorAPI = plans
    with plans.begin(plan(), Request().end) as run:
        assert [each.plan.plan_id for each in plans.running()] == [P]
        begun = executor.status(P)
        run.prepared()
        prepared = executor.status(P)
        run.began()
        answering = executor.status(P)
    done = executor.status(P)
    assert [(each.state, each.done, each.steps) for each in (begun, prepared, answering, done)] == [
        (PlanState.RUNNING, 0, 3),
        (PlanState.RUNNING, 1, 3),
        (PlanState.RUNNING, 2, 3),
        (PlanState.DONE, 3, 3),
    ]
    assert plans.running() == []
    assert plans.plan(P) == plan()


def test_cancelling_ends_the_request_once() -> None:
    plans, request = RunningPlans(), Request()
    with plans.begin(plan(), request.end) as run:
        for _ in range(2):
            status = plans.cancel(P, "maintenance")
        run.failed("what came of it")
    assert (status.state, status.reason) == (PlanState.CANCELLED, "maintenance")
    assert plans.status(P) == status
    assert request.ended == ["maintenance"]


def test_a_plan_may_be_submitted_first_and_begins_once() -> None:
    plans, request = RunningPlans(), Request()
    assert plans.submit_plan(plan()).state is PlanState.QUEUED
    with plans.begin(plan(), request.end):
        assert plans.status(P).state is PlanState.RUNNING
        with pytest.raises(IRError, match="was submitted before"):
            plans.begin(plan(), request.end)
    with pytest.raises(IRError, match="was submitted before"):
        plans.begin(plan(), request.end)


def test_a_plan_that_is_cancelled_before_it_begins_never_does() -> None:
    plans, request = RunningPlans(), Request()
    plans.submit_plan(plan())
    assert plans.cancel(P, "too much").state is PlanState.CANCELLED
    assert plans.running() == []
    with pytest.raises(PlanCancelledError, match="too much"):
        plans.begin(plan(), request.end)
    assert request.ended == []


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (ValueError("no instance"), PlanState.FAILED, "no instance"),
        (asyncio.CancelledError(), PlanState.CANCELLED, "its client left, or its time was over"),
    ],
)
def test_how_a_request_ends_is_how_its_plan_does(error: BaseException, state: PlanState, reason: str) -> None:
    plans = RunningPlans()

    def serve() -> None:
        with plans.begin(plan(), Request().end):
            raise error

    with pytest.raises(type(error)):
        serve()
    status = plans.status(P)
    assert (status.state, status.reason, status.done) == (state, reason, 0)
    assert plans.cancel(P, "too late") == status


def test_an_id_is_used_once_and_an_unknown_one_is_an_error() -> None:
    plans = RunningPlans()
    with plans.begin(plan(), Request().end), pytest.raises(IRError, match="was submitted before"):
        plans.submit_plan(plan())
    with pytest.raises(IRError, match="was submitted before"):
        plans.submit_plan(plan())
    with pytest.raises(KeyError):
        plans.status(PlanId("other"))
    with pytest.raises(KeyError):
        plans.cancel(PlanId("other"), "")


def test_only_so_many_that_are_over_are_remembered() -> None:
    plans = RunningPlans(kept=2)
    for name in "abc":
        with plans.begin(plan(name), Request().end):
            pass
    with pytest.raises(KeyError):
        plans.status(PlanId("a"))
    assert plans.status(PlanId("c")).state is PlanState.DONE
