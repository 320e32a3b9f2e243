"""What every executor of plans keeps to."""

from collections.abc import Callable

import pytest

from kvcontrol.scheduler_ir import (
    Device,
    ExecutionPlan,
    ExecutorAPI,
    IRBuilder,
    IRError,
    IRRequest,
    Placement,
    PlanId,
    PlanState,
)
from lab.research.ir.executor import StepExecutor
from lab.research.ir.interpreter import ReferenceRunner
from lab.research.ir.legs import plan_of
from lab.research.ir.reader import parse

D = Device("d")
REQUEST = IRRequest(request_id="r", prompt_tokens=20, max_tokens=4, placement=Placement(answer=D))


class Stepping:
    """The simplest executor with what drives it, and a look at what a plan holds."""

    def __init__(self) -> None:
        self.runner = ReferenceRunner([REQUEST])
        self.executor: ExecutorAPI = StepExecutor(self.runner)

    def advance(self) -> bool:
        assert isinstance(self.executor, StepExecutor)
        return self.executor.advance() is not None

    def held_tokens(self, plan_id: PlanId) -> int:
        return self.runner.machine(plan_id).held_tokens(D)


@pytest.fixture(params=[Stepping])
def subject(request: pytest.FixtureRequest) -> Stepping:
    make: Callable[[], Stepping] = request.param
    return make()


def plan(name: str = "p") -> ExecutionPlan:
    return plan_of(PlanId(name), IRBuilder().build([REQUEST]))


def test_a_plan_is_queued_runs_and_is_done(subject: Stepping) -> None:
    assert subject.executor.submit_plan(plan()).state is PlanState.QUEUED
    seen = [subject.executor.status(PlanId("p"))]
    while subject.advance():
        seen.append(subject.executor.status(PlanId("p")))
    assert [(each.state, each.done, each.steps) for each in seen] == [
        (PlanState.QUEUED, 0, 2),
        (PlanState.RUNNING, 1, 2),
        (PlanState.DONE, 2, 2),
    ]
    assert seen[-1].state.final


def test_plans_run_one_after_the_other_in_the_order_of_their_coming(subject: Stepping) -> None:
    for name in ("a", "b"):
        subject.executor.submit_plan(plan(name))
    subject.advance()
    subject.advance()
    assert subject.executor.status(PlanId("a")).state is PlanState.DONE
    assert subject.executor.status(PlanId("b")).state is PlanState.QUEUED


@pytest.mark.parametrize("steps", [0, 1])
def test_a_plan_that_is_cancelled_lets_go_of_what_it_holds_and_runs_no_more(subject: Stepping, steps: int) -> None:
    subject.executor.submit_plan(plan())
    for _ in range(steps):
        subject.advance()
    status = subject.executor.cancel(PlanId("p"), "its client left")
    assert (status.state, status.done, status.reason) == (PlanState.CANCELLED, steps, "its client left")
    assert subject.held_tokens(PlanId("p")) == 0
    assert not subject.advance()


def test_a_final_plan_stays_as_it_is(subject: Stepping) -> None:
    subject.executor.submit_plan(plan())
    while subject.advance():
        pass
    assert subject.executor.cancel(PlanId("p"), "too late").state is PlanState.DONE


def test_a_plan_whose_step_cannot_be_carried_out_fails_with_the_reason_and_lets_go(subject: Stepping) -> None:
    graph = parse(
        "%a = prefill @d {request=r, start=0, end=10}\n"
        "%x, %y = decode(%a) @d {request=r, start=20, max_tokens=4}\nresults %x, %y\n"
    )
    subject.executor.submit_plan(plan_of(PlanId("bad"), graph))
    subject.executor.submit_plan(plan("good"))
    while subject.advance():
        pass
    status = subject.executor.status(PlanId("bad"))
    assert status.state is PlanState.FAILED
    assert "its pieces cover [0, 10); it needs [0, 20)" in status.reason
    assert subject.held_tokens(PlanId("bad")) == 0
    assert subject.executor.status(PlanId("good")).state is PlanState.DONE


def test_an_id_is_used_once_and_an_unknown_one_is_an_error(subject: Stepping) -> None:
    subject.executor.submit_plan(plan())
    with pytest.raises(IRError, match="plan 'p' was submitted before"):
        subject.executor.submit_plan(plan())
    for ask in (subject.executor.status, lambda name: subject.executor.cancel(name, "")):
        with pytest.raises(KeyError):
            ask(PlanId("other"))
