"""Applies a tenant's limits to its requests: refused, granted, or held while the limits are unknown.

with await quotas.hold(tenant, is_long=True) as held:   one request and one place, no tokens yet
    ...                                      the request is read
    granted = await quotas.reserve(ask, held)    all that it takes, in the place of what was held
                                             what is still held at the end of the block is given back
"""

from types import TracebackType
from typing import Final, Protocol, Self

from gateway.admission.quota import (
    Demand,
    Dimension,
    Exceeded,
    Granted,
    QuotaMeter,
    QuotaUnavailableError,
    Reservation,
)
from gateway.admission.slot import AdmissionRequest, AdmissionSlot
from gateway.errors import ContextLengthError, InvalidRequestError, NoInstanceError, RateLimitedError
from gateway.errors.context_length import ContextLength
from gateway.limits import TenantLimits
from gateway.types import Tenant

_RETRY_AFTER_S: Final = 2
_UNREAD: Final = Demand(requests=1, tokens=0, places=1)


class ShedMeter(Protocol):
    """Counts refused requests."""

    def shed(self, reason: str) -> None: ...


class Held:
    """A slot held while a body is read; released once, or exchanged for a whole reservation."""

    __slots__ = ("_meter", "_reservation")

    def __init__(self, meter: QuotaMeter, reservation: Reservation | None) -> None:
        self._meter = meter
        self._reservation = reservation

    def take(self) -> Reservation | None:
        """Return the reservation, which is the caller's from now on."""
        reservation, self._reservation = self._reservation, None
        return reservation

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            self._meter.settle(reservation, requests=0, tokens=0)


class TenantQuotas:
    """Holds requests to their tenants' limits. ``meter`` counts what they use."""

    def __init__(self, meter: QuotaMeter, sheds: ShedMeter) -> None:
        self._meter = meter
        self._sheds = sheds
        self._nothing = Held(meter, None)

    def check_length(self, limits: TenantLimits, *, prompt_tokens: int, output_tokens: int) -> None:
        """Raise ``ContextLengthError`` for a request of more tokens than its tenant may use in one."""
        most = limits.context_tokens
        if most is not None and prompt_tokens + output_tokens > most:
            raise ContextLengthError(
                f"the prompt has about {prompt_tokens} tokens and {output_tokens} are asked for; this tenant "
                f"may use {most} in one request",
                ContextLength(
                    prompt_tokens=prompt_tokens,
                    answer_tokens=output_tokens if prompt_tokens < most else None,
                    maximum_tokens=most,
                ),
            )

    async def hold(self, tenant: Tenant, *, is_long: bool) -> Held:
        """Take a request and a place before a request is read, where that is long work; raises as ``reserve``."""
        if not is_long or not tenant.limits.metered:
            return self._nothing
        granted = await self._take(tenant, _UNREAD, None)
        return Held(self._meter, granted.reservation)

    async def reserve(self, ask: AdmissionRequest, held: Held | None = None) -> Granted | None:
        """Reserve everything that a request may use, None without quotas; replaces ``held``.

        Raises ``InvalidRequestError`` for a request that no quota of its tenant could ever let in,
        ``RateLimitedError`` when one is used up, ``NoInstanceError`` when shared ones can't be reached.
        """
        limits = ask.tenant.limits
        if limits.context_tokens is not None:
            self.check_length(limits, prompt_tokens=ask.prompt_tokens, output_tokens=ask.output_tokens)
        if not limits.metered:
            return None
        _check_possible(ask)
        return await self._take(ask.tenant, ask.demand, None if held is None else held.take())

    async def _take(self, tenant: Tenant, demand: Demand, instead_of: Reservation | None) -> Granted:
        try:
            decision = await self._meter.reserve(tenant.id, tenant.limits, demand, instead_of=instead_of)
        except QuotaUnavailableError:  # the reason names Redis' address
            self._sheds.shed("quotas_unavailable")
            raise NoInstanceError(
                "the quotas of this tenant can't be checked now",
                code="quotas_unavailable",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        if isinstance(decision, Exceeded):
            self._sheds.shed(f"quota_{decision.dimension}")
            raise _over_quota(decision)
        return decision


def _check_possible(ask: AdmissionRequest) -> None:
    """Raise ``InvalidRequestError`` for a request that the quotas of its tenant could never let in."""
    limits = ask.tenant.limits
    if limits.tokens_per_min is not None and ask.reserved_tokens > limits.tokens_per_min:
        raise InvalidRequestError(
            f"the request may cost {ask.reserved_tokens} tokens, more than the {limits.tokens_per_min} a minute "
            "of this tenant: it can never be admitted; shorten the prompt or lower max_tokens",
            code="request_exceeds_quota",
        )
    for count, limit, what in (
        (ask.prompts, limits.requests_per_min, "prompts, more than the {limit} requests a minute"),
        (ask.answers, limits.concurrency, "answers, more than the {limit} requests at the same time"),
    ):
        if count > 1 and limit is not None and count > limit:
            raise InvalidRequestError(
                f"the request has {count} {what.format(limit=limit)} of this tenant: it can never be admitted; "
                "send several smaller ones",
                code="request_exceeds_quota",
            )


def _over_quota(decision: Exceeded) -> RateLimitedError:
    unit = "at the same time" if decision.dimension is Dimension.CONCURRENCY else "a minute"
    what = "requests" if decision.dimension is Dimension.CONCURRENCY else decision.dimension
    return RateLimitedError(
        f"this tenant may use {decision.limit} {what} {unit}; try again in {decision.retry_after_s} s",
        retry_after_s=decision.retry_after_s,
        headers=AdmissionSlot.headers_of(decision.requests, decision.tokens),
    )
