"""Limits of a tenant, and its treatment when requests compete."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.priority import Priority


class SloClass(StrEnum):
    """How long a request may wait before it is refused; the seconds are settings."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBudget:
    """A tenant's share of one tier of every instance, in bytes; ``burst_bytes`` None is all of the tier."""

    guaranteed_bytes: int
    burst_bytes: int | None
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """None is no limit. ``context_tokens`` bounds prompt and requested answer together; ``weight`` is the share among
    tenants that wait in the same class.
    """

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrency: int | None = None
    context_tokens: int | None = None
    priority: Priority = Priority.NORMAL
    slo: SloClass = SloClass.STANDARD
    weight: float = 1.0
    kv: Mapping[CacheTier, KvBudget] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def metered(self) -> bool:
        """Whether anything has to be counted for this tenant."""
        return not (self.requests_per_min is None and self.tokens_per_min is None and self.concurrency is None)


UNLIMITED: Final = TenantLimits()
