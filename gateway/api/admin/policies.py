"""``/admin/v1/policies`` and ``/admin/v1/prefix-cache/reset``: changes of all instances at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from math import ceil
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gateway.api.admin.changes import Changes
from gateway.api.admin.mutation import MutationOf, etag, must
from gateway.api.admin.routes import admin_routes
from gateway.errors import ApiError, ConflictApiError, InvalidRequestError, NoInstanceError, NotFoundError
from gateway.fleet import (
    Choice,
    FleetKeeper,
    InstanceControl,
    InstanceControlError,
    Policy,
    PolicySwap,
    SwapBusyError,
    SwapReport,
    reset_prefix_caches,
)
from gateway.registry import Instance, Registry
from gateway.state import Document, Kind, Put
from gateway.state.bodies import NAME_PATTERN, PolicyBody
from gateway.state.stored import read, readable, written

PolicyKind = Annotated[
    str,
    Path(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$",
        description="What it decides: eviction (HBM), eviction:ddr, eviction:nvme, shadow (what is tried beside), "
        "schedule (which waiting request goes next) or pace (whether a step computes prompts or tokens).",
    ),
]


_NOTHING = Choice(policies={}, available={}, strategies={}, fences=None, first={})


class StepView(BaseModel):
    """The outcome of a change on one instance, and its reason."""

    step: str
    reason: str


class PolicyView(PolicyBody):
    """The stored policy of all instances, and the outcome of the last change on each."""

    kind: str
    version: int
    updated_at_s: float = Field(description="Seconds since 1970.")
    instances: dict[str, StepView] = Field(default_factory=dict)


class RunningPolicy(BaseModel):
    """A policy that an instance runs."""

    kind: str
    name: str
    params: dict[str, Any]


class InstancePolicies(BaseModel):
    """Policies of one instance, active and available, or why they are unknown; ``problems`` are its refusals."""

    running: list[RunningPolicy]
    available: dict[str, str] = Field(description="Eviction policies that it knows, each in a few words.")
    strategies: dict[str, str] = Field(description="Strategies of the schedule that it knows, likewise.")
    problem: str | None
    problems: list[str]


class PolicyList(BaseModel):
    """Policies in the store, and those of each instance."""

    object: Literal["list"] = "list"
    data: list[PolicyView]
    instances: dict[str, InstancePolicies]


class ResetBody(BaseModel):
    """Which instances forget their prefix caches; null is all usable ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instances: list[Annotated[str, StringConstraints(pattern=NAME_PATTERN)]] | None = Field(None, max_length=1000)


class InstanceReset(BaseModel):
    """Blocks that each tier forgot, or why nothing is known of it."""

    dropped: dict[str, int] | None
    problem: str | None


class ResetView(BaseModel):
    """By instance."""

    instances: dict[str, InstanceReset]
    failed: int


def policies_router(
    changes: Changes, *, registry: Registry, control: InstanceControl, swap: PolicySwap, keeper: FleetKeeper
) -> APIRouter:
    """Return the routes."""
    router = admin_routes("fleet")
    store = changes.store

    @router.get("/policies")
    async def list_policies() -> PolicyList:
        """The stored policies, and those that each instance runs."""
        present = registry.reporting()
        answers = await asyncio.gather(*(_ask(swap, each) for each in present))
        reports = keeper.report()
        instances = {}
        for each, answer in zip(present, answers, strict=True):
            report = reports.get(each.id)
            choice = _NOTHING if isinstance(answer, InstanceControlError) else answer
            running = choice.policies.values()
            instances[each.id] = InstancePolicies(
                running=[RunningPolicy(kind=one.kind, name=one.name, params=one.params) for one in running],
                available=dict(choice.available),
                strategies=dict(choice.strategies),
                problem=str(answer) if isinstance(answer, InstanceControlError) else None,
                problems=[] if report is None else list(report.problems),
            )
        return PolicyList(data=readable(_view, await store.documents(Kind.POLICY)), instances=instances)

    @router.get("/policies/{kind}")
    async def get_policy(kind: PolicyKind, response: Response) -> PolicyView:
        """The stored policy of a kind for all instances."""
        found = await store.document(Kind.POLICY, kind)
        if found is None:
            raise NotFoundError(f"no policy of kind {kind!r} is stored", code="policy_not_found")
        response.headers["etag"] = etag(found)
        return _view(found)

    _add_swap(router, changes, registry, swap)
    _add_reset(router, changes, registry, control)
    return router


def _add_swap(router: APIRouter, changes: Changes, registry: Registry, swap: PolicySwap) -> None:
    store = changes.store

    @router.put("/policies/{kind}", response_model=PolicyView)
    async def put_policy(kind: PolicyKind, body: PolicyBody, mutation: MutationOf) -> Response:
        """Swap a policy on all usable instances, or on none: after a refusal the others are rolled back (409 with the
        instance and reason; 400 with the allowed values if no instance supports the kind, name or parameters).

        No block is lost in either case. Instances that come later get the policy, too.
        """
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        policy = Policy(kind=kind, name=body.name, params=body.params)
        async with exclusively(swap):
            present = await store.document(Kind.POLICY, kind)
            expected = mutation.expected_as_read(present)
            if expected != (0 if present is None else present.version):
                raise mutation.stale(Kind.POLICY, kind, 0 if present is None else present.version)
            instances = registry.reporting()
            if not instances:
                raise NoInstanceError("no instance with /kv/v1 is usable now", retry_after_s=2)
            answer, target = body.model_dump(mode="json"), f"policies/{kind}"
            async with changes.operation(mutation, "swap", target, answer, undone="rolled_back") as operation:
                noted = partial(changes.operations.note_policies, operation)
                report = await swap.swap(instances, policy, noted=noted)
                operation.unfinished = report.unfinished
                detail = answer | {"instances": _steps(report)}
                if not report.done:
                    await changes.end(operation, mutation.action("swap", target, detail, outcome="rolled_back"))
                    raise _not_swapped(kind, body.name, report)
                steps = {name: StepView(**each) for name, each in _steps(report).items()}
                try:
                    return await changes.apply(
                        [Put(kind=Kind.POLICY, name=kind, body=written(body, present), expected=expected)],
                        mutation=mutation,
                        action=mutation.action("swap", target, detail),
                        status=200,
                        shown=lambda documents: _view(must(documents[0]), steps).model_dump(mode="json"),
                        operation=operation,
                    )
                except Exception:
                    back = await swap.roll_back(instances, report)
                    operation.unfinished = back.unfinished  # another change came first, or the store is unavailable
                    raise


def _add_reset(router: APIRouter, changes: Changes, registry: Registry, control: InstanceControl) -> None:
    @router.post("/prefix-cache/reset", response_model=ResetView)
    async def reset(body: ResetBody, mutation: MutationOf) -> Response:
        """Make instances forget every cached block that no request uses, in all tiers."""
        if (replayed := await changes.replayed(mutation)) is not None:
            return replayed
        instances = _chosen(registry, body.instances)
        meant = {"instances": [each.id for each in instances]}
        async with changes.operation(mutation, "reset", "prefix-cache", meant) as operation:
            done = await reset_prefix_caches(control, instances)
            view = ResetView(
                instances={
                    name: InstanceReset(dropped=None, problem=str(each))
                    if isinstance(each, InstanceControlError)
                    else InstanceReset(
                        dropped={tier.value: count for tier, count in each.dropped.items()}, problem=None
                    )
                    for name, each in done.items()
                },
                failed=sum(isinstance(each, InstanceControlError) for each in done.values()),
            )
            detail = view.model_dump(mode="json")
            outcome = "failed" if view.failed == len(instances) else "partly" if view.failed else "done"
            return await changes.apply(
                [],
                mutation=mutation,
                action=mutation.action("reset", "prefix-cache", detail, outcome=outcome),
                status=200,
                shown=lambda _: detail,
                operation=operation,
            )


@asynccontextmanager
async def exclusively(swap: PolicySwap) -> AsyncIterator[None]:
    """Exclude other changes of policies while the block runs; raises ``ConflictApiError`` after a long wait."""
    try:
        async with swap.exclusive():
            yield
    except SwapBusyError as error:
        raise ConflictApiError(
            f"{error}; try again", code="policy_change_under_way", retry_after_s=ceil(swap.longest_s)
        ) from None


async def _ask(swap: PolicySwap, instance: Instance) -> Choice | InstanceControlError:
    try:
        return await swap.look(instance)
    except InstanceControlError as error:
        return error


def _chosen(registry: Registry, names: list[str] | None) -> tuple[Instance, ...]:
    usable = {str(each.id): each for each in registry.reporting()}
    if names is None:
        if not usable:
            raise NoInstanceError("no instance with /kv/v1 is usable now", retry_after_s=2)
        return tuple(usable.values())
    unknown = sorted(set(names) - usable.keys())
    if unknown:
        raise InvalidRequestError(
            f"instances: {', '.join(unknown)} can't be reset; usable with /kv/v1 are {', '.join(usable) or 'none'}",
            param="instances",
        )
    return tuple(usable[name] for name in dict.fromkeys(names))


def _view(document: Document, steps: dict[str, StepView] | None = None) -> PolicyView:
    body = read(PolicyBody, document)
    return PolicyView(
        **dict(body),
        kind=document.name,
        version=document.version,
        updated_at_s=document.updated_at_s,
        instances=steps or {},
    )


def _steps(report: SwapReport) -> dict[str, dict[str, str]]:
    return {str(name): {"step": each.step.value, "reason": each.reason} for name, each in report.steps.items()}


def _not_swapped(kind: str, name: str, report: SwapReport) -> ApiError:
    if report.mistaken:
        return InvalidRequestError(
            f"policy {name!r} of kind {kind!r}: {report.why_not}", param="name", code="invalid_policy"
        )
    states = ", ".join(f"{instance} {each.step.value}" for instance, each in report.steps.items())
    return ConflictApiError(
        f"policy {name!r} of kind {kind!r} was not applied; {report.why_not} ({states})", code="policy_refused"
    )
