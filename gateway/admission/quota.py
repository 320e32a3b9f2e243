"""Quotas: reserve before, settle after, refund on failure.

A reservation takes requests, the tokens that they may cost at most, and places of the concurrency, all or nothing: one
request and one place, unless the request is a list of prompts or asks for several answers. Settling replaces the
reserved tokens by the real ones and gives the places back. A reservation may replace an earlier one in the same step.
``QuotaMeter`` has two implementations: here, for one process, and in ``redis_quota`` for all that share a Redis.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import NamedTuple, Protocol

from gateway.admission.window import SlidingWindow
from gateway.limits import TenantLimits
from gateway.types import TenantId

_CONCURRENCY_RETRY_S = 1.0
_SWEEP_EVERY = 4096


class Dimension(StrEnum):
    """Kinds of quotas."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


class QuotaUnavailableError(Exception):
    """The shared counters can't be reached: the remaining quota is unknown."""


class Demand(NamedTuple):
    """A request's demand on its tenant's quotas. ``places`` are of the concurrency."""

    requests: int
    tokens: int
    places: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One limit as it stands; ``reset_s`` is when all of it is there again if nothing more is used."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A reservation. ``number`` and ``slot`` are the meter's own."""

    tenant: TenantId
    demand: Demand
    number: str
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The request may go on."""

    reservation: Reservation
    requests: Standing | None
    tokens: Standing | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exceeded:
    """The request may not go on; nothing was taken. ``retry_after_s`` is when it may, others permitting."""

    dimension: Dimension
    limit: int
    retry_after_s: int
    requests: Standing | None
    tokens: Standing | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUsage:
    """A tenant's usage of the last minute, and its requests in flight."""

    requests: int
    tokens: int
    running: int


class QuotaMeter(Protocol):
    """Counts what tenants use; exact under concurrency."""

    async def reserve(
        self, tenant: TenantId, limits: TenantLimits, demand: Demand, *, instead_of: Reservation | None = None
    ) -> Granted | Exceeded:
        """Reserve a demand, each part at most its limit, or return the exceeded quota.

        ``instead_of`` is an earlier reservation of the same request. It is refunded in the same step, granted or not.
        Raises ``QuotaUnavailableError``.
        """
        ...

    def settle(self, reservation: Reservation, *, requests: int, tokens: int) -> None:
        """Replace a reservation by its actual cost, once. (0, 0) is a refund. Never blocks, never raises."""
        ...

    async def usage(self, tenant: TenantId) -> QuotaUsage:
        """Return what counts for a tenant now; raises ``QuotaUnavailableError``."""
        ...

    async def run(self) -> None:
        """Do what has to be done in the background, for ever."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Counters:
    requests: SlidingWindow
    tokens: SlidingWindow
    running: int = 0


class LocalQuotaMeter:
    """Counters of this process. A decision has no wait in it, so concurrent requests can't both take the last place."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tenants: dict[TenantId, _Counters] = {}
        self._new = 0

    async def reserve(
        self, tenant: TenantId, limits: TenantLimits, demand: Demand, *, instead_of: Reservation | None = None
    ) -> Granted | Exceeded:
        if instead_of is not None:
            self.settle(instead_of, requests=0, tokens=0)
        now_s = self._clock()
        counters = self._tenants.get(tenant)
        if counters is None:
            counters = self._add(tenant, now_s)
        exceeded = _exceeded(counters, limits, demand, now_s)
        if exceeded is not None:
            dimension, limit, wait_s = exceeded
            requests, left = _standings(counters, limits, now_s)
            return Exceeded(
                dimension=dimension, limit=limit, retry_after_s=max(1, ceil(wait_s)), requests=requests, tokens=left
            )
        counters.running += demand.places
        slot = counters.requests.add(demand.requests, now_s)
        counters.tokens.add(demand.tokens, now_s)
        requests, left = _standings(counters, limits, now_s)
        reservation = Reservation(tenant=tenant, demand=demand, number="", slot=slot)
        return Granted(reservation=reservation, requests=requests, tokens=left)

    def settle(self, reservation: Reservation, *, requests: int, tokens: int) -> None:
        counters = self._tenants[reservation.tenant]
        counters.running -= reservation.demand.places
        counters.requests.correct(reservation.slot, requests - reservation.demand.requests)
        counters.tokens.correct(reservation.slot, tokens - reservation.demand.tokens)

    async def usage(self, tenant: TenantId) -> QuotaUsage:
        counters = self._tenants.get(tenant)
        if counters is None:
            return QuotaUsage(requests=0, tokens=0, running=0)
        now_s = self._clock()
        return QuotaUsage(
            requests=counters.requests.used(now_s), tokens=counters.tokens.used(now_s), running=counters.running
        )

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        return

    def _add(self, tenant: TenantId, now_s: float) -> _Counters:
        """Add a tenant; now and then let go those that have used nothing for a minute."""
        self._new += 1
        if self._new % _SWEEP_EVERY == 0:
            for name, each in list(self._tenants.items()):
                if not each.running and not each.requests.used(now_s) and not each.tokens.used(now_s):
                    del self._tenants[name]
        counters = self._tenants[tenant] = _Counters(requests=SlidingWindow(), tokens=SlidingWindow())
        return counters


def _exceeded(
    counters: _Counters, limits: TenantLimits, demand: Demand, now_s: float
) -> tuple[Dimension, int, float] | None:
    limit = limits.requests_per_min
    if limit is not None and (wait_s := counters.requests.free_in_s(demand.requests, limit, now_s)):
        return Dimension.REQUESTS, limit, wait_s
    limit = limits.tokens_per_min
    if limit is not None and (wait_s := counters.tokens.free_in_s(demand.tokens, limit, now_s)):
        return Dimension.TOKENS, limit, wait_s
    limit = limits.concurrency
    if limit is not None and counters.running + demand.places > limit:
        return Dimension.CONCURRENCY, limit, _CONCURRENCY_RETRY_S
    return None


def _standings(counters: _Counters, limits: TenantLimits, now_s: float) -> tuple[Standing | None, Standing | None]:
    return (
        standing(limits.requests_per_min, counters.requests.used(now_s), counters.requests.empty_in_s(now_s)),
        standing(limits.tokens_per_min, counters.tokens.used(now_s), counters.tokens.empty_in_s(now_s)),
    )


def standing(limit: int | None, used: int, reset_s: float) -> Standing | None:
    """Return how a limit stands; None where there is none."""
    return None if limit is None else Standing(limit=limit, remaining=max(0, limit - used), reset_s=reset_s)
