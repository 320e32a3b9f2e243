"""Quotas of tenants in each tier, and the choice of the tenant that gives up a block.

A tenant has a *guarantee*, below which nobody else pushes it, and a *burst*, above which it never gets: what it brings
beyond it takes the place of its own blocks. Between the two, tenants share what is left by weight: the next block to
go belongs to the tenant whose blocks above its guarantee, divided by its weight, are most, the newcomer's own counted
in. Tenants that all want more than there is so come to equal shares, whatever their pace.

An idle tenant keeps its share until others bring more than theirs. That is the price of not being pushed out by them.

Sizes are in bytes where operators give them and in blocks where decisions are made.
"""

import heapq
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.errors import QuotaError


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """A tenant's share of one tier; ``burst_bytes`` None is all of it. ``QuotaError`` when out of range."""

    guaranteed_bytes: int = 0
    burst_bytes: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.guaranteed_bytes < 0:
            raise QuotaError(f"guaranteed_bytes is {self.guaranteed_bytes}; it must be >= 0")
        if self.burst_bytes is not None and self.burst_bytes < self.guaranteed_bytes:
            raise QuotaError(
                f"burst_bytes is {self.burst_bytes}; it must be >= guaranteed_bytes ({self.guaranteed_bytes})"
            )
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise QuotaError(f"weight is {self.weight}; it must be a number > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """``blocks`` of those asked for may come in, once ``own_first`` of the tenant's own have gone; why not all."""

    blocks: int
    own_first: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """A tenant in one tier. ``over_burst_blocks`` counts its blocks that its burst evicted or refused; ``changed`` is
    whether its quota was set after the tier was opened.
    """

    used_blocks: int
    used_bytes: int
    quota: TenantQuota
    over_burst_blocks: int
    changed: bool = False


@dataclass(slots=True)
class _Account:
    quota: TenantQuota
    used: int = 0
    over_burst: int = 0
    guaranteed: int = 0
    burst: int = 0


@dataclass(slots=True)
class _Tier:
    capacity: int
    block_bytes: int
    default: TenantQuota
    accounts: dict[str, _Account] = field(default_factory=dict)
    quotas: dict[str, TenantQuota] = field(default_factory=dict)
    first: Mapping[str, TenantQuota] = field(default_factory=dict)
    """The quotas that were set before the tier was opened."""


_NO_BURST: Final = sys.maxsize
"""The tier itself is the limit, and what makes room in it is for ``donors`` to say."""
NO_QUOTA: Final = TenantQuota()
_KEPT_ACCOUNTS: Final = 1024
"""Beyond so many, an account without blocks is forgotten with its count of what its burst cost it."""


class QuotaManager:
    """Accounts of every tenant in every tier. One thread changes and decides; ``usage`` may be read from any.

    Tenants without a quota of their own have a tier's of ``defaults``, or all of it: nothing guaranteed, so that any
    number of them fits. ``QuotaError`` for a default that guarantees something.
    """

    def __init__(self, *, defaults: Mapping[CacheTier, TenantQuota] = MappingProxyType({})) -> None:
        for tier, quota in defaults.items():
            if quota.guaranteed_bytes:
                raise QuotaError(
                    f"{tier}: a default quota guarantees bytes to any number of tenants; it must have none"
                )
        self._defaults = dict(defaults)
        self._tiers: dict[CacheTier, _Tier] = {}
        self._wanted: dict[tuple[str, CacheTier], TenantQuota] = {}
        self.revision = 0
        """Grows with every ``set``."""

    def open_tier(self, tier: CacheTier, *, capacity_blocks: int, block_bytes: int) -> None:
        """Begin to account for a tier, once. ``QuotaError`` if the guarantees set so far don't fit into it."""
        if capacity_blocks <= 0 or block_bytes <= 0:
            raise QuotaError(f"{tier}: {capacity_blocks} blocks of {block_bytes} bytes; both must be > 0")
        if tier in self._tiers:
            raise QuotaError(f"{tier} is accounted for already")
        opened = _Tier(capacity=capacity_blocks, block_bytes=block_bytes, default=self._defaults.get(tier, NO_QUOTA))
        opened.quotas = {tenant: quota for (tenant, place), quota in self._wanted.items() if place is tier}
        opened.first = dict(opened.quotas)
        _must_fit(tier, opened, opened.quotas)
        self._tiers[tier] = opened

    def set(self, tenant: str, tier: CacheTier, quota: TenantQuota | None) -> None:
        """Give a tenant another quota from now on; nothing is evicted before room is needed. None brings back the quota
        that it had when the tier was opened, or the default.

        ``QuotaError``, and no change, when all guarantees together would exceed the tier.
        """
        opened = self._tiers.get(tier)
        if opened is not None:
            quota = opened.first.get(tenant) if quota is None else quota
            quotas = dict(opened.quotas)
            if quota is None:
                quotas.pop(tenant, None)
            else:
                quotas[tenant] = quota
            _must_fit(tier, opened, quotas)
            opened.quotas = quotas
            if (account := opened.accounts.get(tenant)) is not None:
                self._apply(opened, account, quotas.get(tenant, opened.default))
        self.revision += 1
        if quota is None:
            self._wanted.pop((tenant, tier), None)
        else:
            self._wanted[tenant, tier] = quota

    def get(self, tenant: str, tier: CacheTier) -> TenantQuota:
        """Return the quota of a tenant."""
        return self._wanted.get((tenant, tier), self._defaults.get(tier, NO_QUOTA))

    def charge(self, tenant: str, tier: CacheTier, blocks: int) -> None:
        """Follow blocks that a tenant got."""
        self._account(self._tiers[tier], tenant).used += blocks

    def refund(self, tenant: str, tier: CacheTier, blocks: int) -> None:
        """Follow blocks that a tenant no longer has. ``QuotaError`` for more than it had."""
        opened = self._tiers[tier]
        account = self._account(opened, tenant)
        if blocks > account.used:
            raise QuotaError(f"{tenant} gives back {blocks} blocks of {tier} and has {account.used}")
        account.used -= blocks
        if not account.used and not (account.over_burst and len(opened.accounts) <= _KEPT_ACCOUNTS):
            del opened.accounts[tenant]  # tenants come and go

    def may_use(self, tenant: str, tier: CacheTier, blocks: int) -> Allowance:
        """Return how many of ``blocks`` may come in; changes nothing. O(1)."""
        opened = self._tiers[tier]
        account = opened.accounts.get(tenant)
        used = account.used if account is not None else 0
        burst = account.burst if account is not None else self._burst(opened, opened.quotas.get(tenant, opened.default))
        allowed = min(blocks, burst, opened.capacity)
        over = max(0, used + allowed - burst)
        reason = "" if allowed == blocks and not over else f"burst of {burst} blocks in {tier}"
        return Allowance(blocks=allowed, own_first=over, reason=reason)

    def donors(
        self, tenant: str | None, tier: CacheTier, wanted: int, evictable: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        """Return the tenants that give up blocks for ``wanted`` of ``tenant``, and how many; changes nothing.

        None where nobody gets them: the tier is to become emptier.
        Fewer than wanted when the rest is guaranteed or can't be evicted. O(tenants + wanted log tenants).
        """
        opened = self._tiers[tier]
        heap: list[tuple[float, str, int, float, int]] = []
        for name, free in evictable.items():
            if free <= 0:
                continue
            account = self._account(opened, name)
            above = account.used - account.guaranteed
            # its own blocks make way for its own even below its guarantee: that changes nobody's share
            spare = free if name == tenant else min(free, above)
            if name == tenant:
                above += wanted
            if spare > 0:
                heap.append((-above / account.quota.weight, name, spare, account.quota.weight, above))
        heapq.heapify(heap)
        given: dict[str, int] = {}
        left = wanted
        while left > 0 and heap:
            _, name, spare, weight, above = heap[0]
            take = 1 if len(heap) > 1 else min(left, spare)
            given[name] = given.get(name, 0) + take
            left -= take
            if spare > take:
                above -= take
                heapq.heapreplace(heap, (-above / weight, name, spare - take, weight, above))
            else:
                heapq.heappop(heap)
        return list(given.items())

    def over_burst(self, tier: CacheTier) -> list[tuple[str, int]]:
        """Return tenants that have more than their burst, and by how much: after a quota has shrunk. O(tenants)."""
        return [
            (name, account.used - account.burst)
            for name, account in self._tiers[tier].accounts.items()
            if account.used > account.burst
        ]

    def count_over_burst(self, tenant: str, tier: CacheTier, blocks: int) -> None:
        """Count blocks that a tenant's burst cost it."""
        self._account(self._tiers[tier], tenant).over_burst += blocks

    def usage(self, tier: CacheTier) -> dict[str, TenantUsage]:
        """Return every tenant that has or had something in a tier, or has a quota there."""
        opened = self._tiers[tier]
        accounts = opened.accounts.copy()
        for tenant, quota in opened.quotas.items():
            accounts.setdefault(tenant, _Account(quota))
        return {
            tenant: TenantUsage(
                used_blocks=account.used,
                used_bytes=account.used * opened.block_bytes,
                quota=account.quota,
                over_burst_blocks=account.over_burst,
                changed=opened.quotas.get(tenant) != opened.first.get(tenant),
            )
            for tenant, account in accounts.items()
        }

    def _account(self, opened: _Tier, tenant: str) -> _Account:
        account = opened.accounts.get(tenant)
        if account is None:
            account = opened.accounts[tenant] = _Account(opened.default)
            self._apply(opened, account, opened.quotas.get(tenant, opened.default))
        return account

    def _apply(self, opened: _Tier, account: _Account, quota: TenantQuota) -> None:
        account.quota = quota
        account.guaranteed = quota.guaranteed_bytes // opened.block_bytes
        account.burst = self._burst(opened, quota)

    @staticmethod
    def _burst(opened: _Tier, quota: TenantQuota) -> int:
        blocks = opened.capacity if quota.burst_bytes is None else quota.burst_bytes // opened.block_bytes
        return blocks if blocks < opened.capacity else _NO_BURST


def _must_fit(tier: CacheTier, opened: _Tier, quotas: Mapping[str, TenantQuota]) -> None:
    wanted = sum(quota.guaranteed_bytes // opened.block_bytes for quota in quotas.values())
    if wanted > opened.capacity:
        raise QuotaError(
            f"guarantees in {tier} add up to {wanted} blocks of {opened.block_bytes} bytes; it has {opened.capacity}"
        )
