import pytest

from kvcontrol.core.roles import KVTransport
from kvcontrol.scheduler_ir import (
    Device,
    ExecutionPlan,
    Handover,
    IRBuilder,
    IRError,
    IRGraph,
    IRRequest,
    Leg,
    LegKind,
    NodeType,
    Placement,
    PlanId,
)
from lab.research.ir.legs import legs_of, plan_of
from lab.research.ir.reader import parse

P, D = Device("p0"), Device("d0")


def graph(placement: Placement) -> IRGraph:
    return IRBuilder().build([IRRequest(request_id="r", prompt_tokens=64, max_tokens=8, placement=placement)])


def test_a_hybrid_plan_is_one_call() -> None:
    plan = plan_of(PlanId("p"), graph(Placement(answer=D)))
    assert plan.legs == (Leg(kind=LegKind.ANSWER, device=D, steps=(NodeType.PREFILL, NodeType.DECODE)),)
    assert plan.before_answer == ()
    assert plan.answer.device == plan.target_instance_id == "d0"
    assert plan.request_ids == ("r",)


@pytest.mark.parametrize("transport", KVTransport)
def test_a_separated_plan_computes_hands_over_and_answers(transport: KVTransport) -> None:
    plan = plan_of(PlanId("p"), graph(Placement(answer=D, handover=Handover(prefill=P, transport=transport))))
    assert plan.before_answer == (
        Leg(kind=LegKind.PREFILL, device=P, steps=(NodeType.PREFILL,), transport=transport),
        Leg(
            kind=LegKind.HANDOVER,
            device=P,
            steps=(NodeType.TRANSFER, NodeType.EVICT),
            target=D,
            transport=transport,
        ),
    )
    assert plan.answer == Leg(kind=LegKind.ANSWER, device=D, steps=(NodeType.DECODE,))


def test_a_graph_is_worked_out_when_somebody_looks_and_once() -> None:
    built: list[IRGraph] = []

    def build() -> IRGraph:
        built.append(graph(Placement(answer=D)))
        return built[-1]

    legs = legs_of(graph(Placement(answer=D)))
    plan = ExecutionPlan(
        plan_id=PlanId("p"), request_ids=("r",), target_instance_id=plan_target(), legs=legs, graph=build
    )
    assert not built
    assert plan.ir_graph is plan.ir_graph
    assert len(built) == 1


def plan_target() -> str:
    return D


def test_a_graph_that_answers_nothing_is_no_plan() -> None:
    only = parse("%a = prefill @p0 {request=r, start=0, end=4}\nresults %a\n")
    with pytest.raises(IRError, match="it answers nothing"):
        legs_of(only)


def test_a_plan_is_answered_by_one_instance() -> None:
    two = IRBuilder().build(
        [
            IRRequest(request_id=device, prompt_tokens=4, max_tokens=4, placement=Placement(answer=device))
            for device in (P, D)
        ]
    )
    with pytest.raises(IRError, match="its answers come from 2 instances"):
        plan_of(PlanId("p"), two)
