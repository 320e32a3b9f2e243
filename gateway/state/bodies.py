"""Tenants, keys and quotas as they are stored and as ``/admin/v1`` takes and shows them."""

import re
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from gateway.limits import KvBudget, SloClass, TenantLimits
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.priority import Priority

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
DEFAULT_QUOTA = "_default"
"""Name of the quota of tenants that have none of their own; no tenant can be called that."""

CURRENT_PRESET = "current"
"""Name of the document with the preset of the fleet."""

_NAME = re.compile(NAME_PATTERN)
_MOST = 10**12


def _no_zero(value: object) -> object:
    """Refuse 0: it could be read as "nothing", or as "no limit"."""
    if value == 0 and not isinstance(value, bool):
        raise ValueError(
            "0 would refuse every request: to do that, suspend the tenant (PUT /admin/v1/tenants/NAME with "
            '{"suspended": true}, or kvgate admin tenants suspend NAME); null is no limit'
        )
    return value


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
PolicyName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,()=+ -]{0,500}$")]
Text = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")]
Count = Annotated[int, Field(ge=1, le=_MOST, strict=True)]
Limit = Annotated[Count | None, BeforeValidator(_no_zero)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60, strict=True)]
TierName = Literal["HBM", "DDR", "NVME", "REMOTE"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TenantBody(_Body):
    """A tenant. All requests of a suspended tenant are refused with 403."""

    note: Text = Field("", description="For people.")
    suspended: bool = Field(default=False, strict=True, description="Whether its requests are refused.")


class KvBudgetBody(_Body):
    """A tenant's share of one tier of every instance."""

    guaranteed_bytes: Bytes = Field(0, description="Bytes that others can't take.")
    burst_bytes: Bytes | None = Field(None, description="Most bytes that it may hold; null is all of the tier.")
    weight: float = Field(1.0, gt=0, le=1e6, description="Weight of the share of space without guarantees.")


class QuotaBody(_Body):
    """The limits of a tenant. Null is no limit."""

    requests_per_min: Limit = Field(None, description="Requests within any 60 seconds.")
    tokens_per_min: Limit = Field(None, description="Prompt and completion tokens within any 60 seconds.")
    concurrency: Limit = Field(None, description="Requests at the same time, waiting ones included.")
    context_tokens: Limit = Field(None, description="Prompt and requested completion of one request, in tokens.")
    priority: Priority = Field(Priority.NORMAL, description="Priority class of waiting requests.")
    slo: SloClass = Field(SloClass.STANDARD, description="How long a request may wait; seconds are a setting.")
    weight: float = Field(1.0, gt=0, le=1e6, description="Share among tenants that wait in the same class.")
    kv: dict[TierName, KvBudgetBody] = Field(default_factory=dict, description="KV budget by tier.")

    def limits(self) -> TenantLimits:
        """Return the limits for the request path."""
        kv = {
            CacheTier(tier): KvBudget(
                guaranteed_bytes=each.guaranteed_bytes, burst_bytes=each.burst_bytes, weight=each.weight
            )
            for tier, each in self.kv.items()
        }
        return TenantLimits(
            requests_per_min=self.requests_per_min,
            tokens_per_min=self.tokens_per_min,
            concurrency=self.concurrency,
            context_tokens=self.context_tokens,
            priority=self.priority,
            slo=self.slo,
            weight=self.weight,
            kv=MappingProxyType(kv),
        )


class PresetBody(_Body):
    """The preset of the fleet."""

    name: Name = Field(description="A preset, like long-context-32k.")
    hardware: Name = Field(description="What the instances run on, like cpu.")


class PolicyBody(_Body):
    """A policy for all instances."""

    name: PolicyName = Field(
        description="A policy that the instances know, like lru; for shadow, candidates with commas."
    )
    params: dict[Annotated[str, StringConstraints(max_length=64)], str | int | float | bool | None] = Field(
        default_factory=dict, max_length=64, description="Its parameters; none is its defaults."
    )


class KeyBody(_Body):
    """A stored API key: its digest in hex, never itself. A revoked one stays, so that the audit log can be read."""

    tenant: Name
    digest: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})+$")]
    note: Text = ""
    expires_at_s: float | None = None
    revoked_at_s: float | None = None


def is_name(text: str) -> bool:
    """Whether this can be the name of a tenant."""
    return _NAME.fullmatch(text) is not None
