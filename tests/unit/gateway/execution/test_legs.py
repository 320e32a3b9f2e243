from dataclasses import replace

import pytest

from gateway.execution.legs import EngineCall, LegExecutor, LegFailedError
from gateway.registry import Instance
from gateway.types import Operation, RequestId
from gateway.upstream import FailureKind, UpstreamFailureError
from kvcontrol.scheduler_ir import Leg, LegKind
from tests.unit.gateway.placement.test_separation import SIZE, Divided

CALL = EngineCall(
    operation=Operation.CHAT, path=b"/v1/chat/completions", request_id=RequestId("r"), headers=(), body=b"{}"
)


class Noting:
    """A runner that adds a header with its leg, and says what its instance had to do meanwhile."""

    def __init__(self, world: Divided, failure: UpstreamFailureError | None = None) -> None:
        self.world = world
        self.failure = failure
        self.loads: list[tuple[str, int, int]] = []

    async def run(self, leg: Leg, instance: Instance, call: EngineCall) -> EngineCall:
        load = self.world.load.of(instance.id)
        self.loads.append((leg.kind, load.in_flight, load.prefill_tokens))
        if self.failure is not None:
            raise self.failure
        return replace(call, headers=[*call.headers, ("x-leg", leg.kind)])


async def test_a_plan_without_other_legs_leaves_the_call_as_it_is() -> None:
    world = Divided()
    plan = world.planner.plan(world.prompt((1, 500)), world.instances, size=SIZE)
    assert await LegExecutor(load=world.load, runners={}).before_answer(plan, CALL) is CALL


async def test_legs_run_in_their_order_and_count_at_their_instance_while_they_do() -> None:
    world = Divided("p0")
    plan = world.planner.plan(world.prompt((1, 500)), world.instances, size=SIZE)
    runner = Noting(world)
    walker = LegExecutor(load=world.load, runners={LegKind.PREFILL: runner, LegKind.HANDOVER: runner})
    call = await walker.before_answer(plan, CALL)
    assert call.headers == [("x-leg", "prefill"), ("x-leg", "handover")]
    assert runner.loads == [("prefill", 1, 500), ("handover", 1, 0)]
    assert world.load.of(world.prefills[0].id).in_flight == 0


async def test_a_leg_that_fails_names_its_instance_and_is_counted_no_more() -> None:
    world = Divided("p0")
    plan = world.planner.plan(world.prompt((1, 500)), world.instances, size=SIZE)
    runner = Noting(world, UpstreamFailureError(FailureKind.NO_ANSWER, "it died"))
    with pytest.raises(LegFailedError, match="it died") as failed:
        await LegExecutor(load=world.load, runners={LegKind.PREFILL: runner}).before_answer(plan, CALL)
    assert failed.value.instance.id == "p0"
    assert failed.value.kind is FailureKind.NO_ANSWER
    assert world.load.of(world.prefills[0].id).in_flight == 0


async def test_a_leg_that_nobody_here_can_carry_out_is_a_failure() -> None:
    world = Divided("p0")
    plan = world.planner.plan(world.prompt((1, 500)), world.instances, size=SIZE)
    with pytest.raises(LegFailedError, match="this gateway can't carry out a prefill leg"):
        await LegExecutor(load=world.load, runners={}).before_answer(plan, CALL)
