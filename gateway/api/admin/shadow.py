"""``/admin/v1/policies/shadow``: hit ratios of shadow policies in HBM, by instance and in total.

Which candidates are followed is a policy of kind ``shadow``: ``PUT /admin/v1/policies/shadow`` with their names.
"""

import asyncio
from collections.abc import Iterable
from math import isfinite

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field

from gateway.api.admin.auto_swap import AutoSwap
from gateway.api.admin.routes import admin_routes
from gateway.fleet import InstanceControl, InstanceControlError
from gateway.fleet.evidence import Verdict
from gateway.registry import Instance, Registry
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.policy_control import POLICY_PATH, PolicyReport

_EVICTION = "eviction"
_SHADOW = "shadow"


class Standing(BaseModel):
    """A policy: the share of sampled blocks that it found or would have found."""

    policy: str
    lookups: int
    hits: int
    hit_ratio: float | None


class InstanceShadows(BaseModel):
    """One instance: its policy, what that found since it is in charge, and the candidates; or why that is unknown."""

    in_charge: str | None = None
    hit_ratio_since_swap: float | None = None
    candidates: list[Standing] = Field(default_factory=list)
    problem: str | None = None


class LeadView(BaseModel):
    """A candidate beside the policy in charge, over the fleet's last periods of a minute."""

    policy: str
    lead: float = Field(description="Blocks found more than the policy in charge found, as a share of look-ups.")
    noise: float | None = Field(description="Its standard error; null while there is one period alone.")
    periods: int
    verdict: Verdict = Field(description="tie: not proven to be ahead or behind, or not by enough to matter.")


class ShadowView(BaseModel):
    """By instance, and the candidates over all instances, the one that found most first.

    ``leads`` is empty unless one candidate is in charge everywhere; ``auto`` is whether the gateway swaps by itself.
    """

    candidates: list[Standing]
    instances: dict[str, InstanceShadows]
    leads: list[LeadView]
    auto: bool


def shadow_router(*, registry: Registry, control: InstanceControl, auto: AutoSwap) -> APIRouter:
    """Return the route."""
    router = admin_routes("fleet")

    @router.get("/policies/shadow")
    async def shadow() -> ShadowView:
        """How candidates would have done on the requests that instances had."""
        instances = registry.reporting()
        reports = await asyncio.gather(*(_ask(control, each) for each in instances))
        by_instance = {str(each.id): view for each, view in zip(instances, reports, strict=True)}
        return ShadowView(
            candidates=_together(by_instance.values()), instances=by_instance, leads=_leads(auto), auto=auto.active
        )

    return router


async def _ask(control: InstanceControl, instance: Instance) -> InstanceShadows:
    try:
        report = msgspec.json.decode(await control.call(instance, "GET", POLICY_PATH), type=PolicyReport)
    except InstanceControlError as error:
        return InstanceShadows(problem=str(error))
    except UNREADABLE as error:
        return InstanceShadows(problem=f"{POLICY_PATH} can't be read: {error}")
    in_charge = next((each for each in report.policies if each.kind == _EVICTION), None)
    shadows = next((each.shadow for each in report.policies if each.kind == _SHADOW and each.shadow is not None), None)
    return InstanceShadows(
        in_charge=None if in_charge is None else in_charge.name,
        hit_ratio_since_swap=None
        if in_charge is None or in_charge.eviction is None
        else in_charge.eviction.hit_ratio_since_swap,
        candidates=[]
        if shadows is None
        else [
            Standing(policy=each.policy, lookups=each.lookups, hits=each.hits, hit_ratio=each.hit_ratio)
            for each in shadows.standings
        ],
    )


def _leads(auto: AutoSwap) -> list[LeadView]:
    if auto.in_charge is None:
        return []
    return [
        LeadView(
            policy=each.policy,
            lead=each.lead,
            noise=each.noise if isfinite(each.noise) else None,
            periods=each.periods,
            verdict=each.verdict,
        )
        for each in auto.evidence.leads(auto.in_charge)
    ]


def _together(instances: Iterable[InstanceShadows]) -> list[Standing]:
    sums: dict[str, tuple[int, int]] = {}
    for each in instances:
        for one in each.candidates:
            lookups, hits = sums.get(one.policy, (0, 0))
            sums[one.policy] = (lookups + one.lookups, hits + one.hits)
    standings = [
        Standing(policy=policy, lookups=lookups, hits=hits, hit_ratio=hits / lookups if lookups else None)
        for policy, (lookups, hits) in sums.items()
    ]
    return sorted(standings, key=lambda each: -(each.hit_ratio or 0.0))
