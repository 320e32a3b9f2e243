"""``/admin/v1/plans``: the plans that this process serves requests by, and their end by an operator."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel

from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import MutationOf
from gateway.api.admin.routes import admin_routes
from gateway.errors import NotFoundError
from gateway.execution.running_plans import RunningPlans
from kvcontrol.scheduler_ir import ExecutionPlan, PlanId, PlanState, PlanStatus, render

_MOST = 1000
Id = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class LegView(BaseModel):
    """One call to an instance."""

    kind: str
    instance: str
    transport: str | None


class PlanView(BaseModel):
    """A plan: how many of its calls are ``done``, and why it failed or was cancelled."""

    id: str
    requests: list[str]
    instance: str
    state: PlanState
    done: int
    legs: list[LegView]
    reason: str


class PlanDetail(PlanView):
    """The same with its steps."""

    graph: str


class PlanList(BaseModel):
    """Those that are being carried out, the oldest first; how many there are in ``total``."""

    total: int
    data: list[PlanView]


def plans_router(changes: Changes, plans: RunningPlans) -> APIRouter:
    """Return the routes."""
    router = admin_routes("routing")

    @router.get("/plans")
    async def list_plans(limit: Annotated[int, Query(ge=1, le=_MOST)] = 100) -> PlanList:
        """What this process does now: a gateway of several processes answers for one of them."""
        running = plans.running()
        return PlanList(total=len(running), data=[_view(each.plan, each.status) for each in running[:limit]])

    @router.get("/plans/{plan_id}")
    async def get_plan(plan_id: Id) -> PlanDetail:
        """One plan, also one of the last thousand that are over."""
        try:
            plan, status = plans.plan(PlanId(plan_id)), plans.status(PlanId(plan_id))
        except KeyError:
            raise _unknown(plan_id) from None
        return PlanDetail(**_view(plan, status).model_dump(), graph=render(plan.ir_graph))

    @router.delete("/plans/{plan_id}", response_model=PlanView)
    async def cancel_plan(
        plan_id: Id,
        mutation: MutationOf,
        reason: Annotated[str, Query(max_length=200, description="Message for its client.")] = "no reason given",
    ) -> Response:
        """End the request that it serves, here and at its engines; one that is over stays as it is."""
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        if not plans.knows(PlanId(plan_id)):
            raise _unknown(plan_id)
        target = f"plans/{plan_id}"
        async with changes.operation(mutation, "cancel", target, {"reason": reason}) as operation:
            try:
                plan, status = plans.plan(PlanId(plan_id)), plans.cancel(PlanId(plan_id), reason)
            except KeyError:
                raise _unknown(plan_id) from None
            return await changes.apply(
                [],
                mutation=mutation,
                action=mutation.action("cancel", target, {"reason": reason, "state": status.state}),
                status=200,
                shown=lambda _: _view(plan, status).model_dump(mode="json"),
                operation=operation,
            )

    return router


def _view(plan: ExecutionPlan, status: PlanStatus) -> PlanView:
    return PlanView(
        id=plan.plan_id,
        requests=list(plan.request_ids),
        instance=plan.target_instance_id,
        state=status.state,
        done=status.done,
        legs=[
            LegView(kind=leg.kind, instance=leg.device, transport=None if leg.transport is None else leg.transport)
            for leg in plan.legs
        ],
        reason=status.reason,
    )


def _unknown(plan_id: str) -> NotFoundError:
    return NotFoundError(f"unknown plan {plan_id!r} in this process: another process has it, or it ended long ago")
