"""KV budgets of tenants in the engines' units: those that an instance should have, and those that it reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.fleet.control import InstanceControl, InstanceControlError
from gateway.limits import KvBudget
from gateway.registry import Instance
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.tenant import SHARED_TENANT
from kvcontrol.core.tier_control import QUOTAS_PATH, QuotaBody, QuotaChange, Quotas
from kvcontrol.presets import QuotaPart

BudgetKey = tuple[str, CacheTier]
"""The engines' name of a tenant, and the tier."""
Budgets = Mapping[BudgetKey, KvBudget]

LOWER_TIERS: Final = (CacheTier.DDR, CacheTier.NVME)


@dataclass(frozen=True, slots=True)
class ReportedBudgets:
    """``quotas`` of an instance, and of which tenants they were ``changed`` since it started."""

    quotas: Mapping[BudgetKey, QuotaBody]
    changed: frozenset[BudgetKey]


async def ask_budgets(control: InstanceControl, instance: Instance) -> ReportedBudgets:
    """Return an instance's budgets; raises ``InstanceControlError``."""
    return _read(await control.call(instance, "GET", QUOTAS_PATH))


async def send_budget(
    control: InstanceControl, instance: Instance, key: BudgetKey, budget: KvBudget | None
) -> ReportedBudgets:
    """Set one budget, None for the one of the instance's start, and return all its budgets then; raises
    ``InstanceControlError``.
    """
    tenant, tier = key
    quota = None if budget is None else quota_of(budget)
    return _read(await control.call(instance, "PUT", QUOTAS_PATH, QuotaChange(tenant=tenant, tier=tier, quota=quota)))


def quota_of(budget: KvBudget) -> QuotaBody:
    """Return a budget in the instances' form."""
    return QuotaBody(guaranteed_bytes=budget.guaranteed_bytes, burst_bytes=budget.burst_bytes, weight=budget.weight)


def budget_of(quota: QuotaBody) -> KvBudget:
    """Return a quota of an instance as a budget."""
    return KvBudget(guaranteed_bytes=quota.guaranteed_bytes, burst_bytes=quota.burst_bytes, weight=quota.weight)


def share_of(instance: Instance, shares: QuotaPart) -> dict[CacheTier, KvBudget]:
    """Return a preset's shares of each tier of an instance below HBM, in bytes."""
    if instance.stats is None:
        return {}
    found = {}
    for tier in LOWER_TIERS:
        stats = instance.stats.tiers.get(tier)
        if stats is not None and stats.capacity_blocks:
            size_bytes = stats.capacity_blocks * stats.block_bytes
            found[tier] = KvBudget(
                guaranteed_bytes=int(size_bytes * shares.guaranteed_share),
                burst_bytes=int(size_bytes * shares.burst_share),
                weight=1.0,
            )
    return found


def _read(body: bytes) -> ReportedBudgets:
    try:
        tiers = msgspec.json.decode(body, type=Quotas).tiers
    except UNREADABLE as error:
        raise InstanceControlError(f"{QUOTAS_PATH} can't be read: {error}", status=None, sure=True) from None
    return ReportedBudgets(
        quotas={(tenant, tier): each.quota for tier, tenants in tiers.items() for tenant, each in tenants.items()},
        changed=frozenset(
            (tenant, tier)
            for tier, tenants in tiers.items()
            for tenant, each in tenants.items()
            if each.changed and tenant != SHARED_TENANT
        ),
    )
