"""The bodies of ``/kv/v1`` by which operators look at the tiers of an instance and change what they do.

JSON on the wire, hashes as lower-case hex. Requests are parsed strictly: an unknown field is an error that names it.
"""

from typing import Annotated

import msgspec

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.tenant import TENANT_PATTERN

BLOCKS_PATH = "/kv/v1/blocks"
MIGRATE_PATH = "/kv/v1/migrate"
QUOTAS_PATH = "/kv/v1/quotas"
RESET_PATH = "/kv/v1/prefix-cache/reset"

MOST_BLOCKS = 10_000
"""Blocks that one request may name, or be told of."""
MOST_BYTES = (1 << 63) - 1
"""What JSON's readers can be relied on to take as a whole number."""


class BlockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One block below HBM: its hex hash, the tiers that it can be read from, who it is accounted to."""

    hash: str
    tiers: list[CacheTier]
    size_bytes: int
    tenant: str
    idle_s: float


class BlockList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /kv/v1/blocks``: the ``limit`` blocks used last, of ``total`` below HBM."""

    total: int
    blocks: list[BlockInfo]


class BlockQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``GET /kv/v1/blocks`` is asked for: of one tier or of all, of one tenant or of all."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCKS)] = 100
    tier: CacheTier | None = None
    tenant: str | None = None


class MigrateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /kv/v1/migrate``: bring blocks, by hex hash, into ``DDR`` (prefetch) or also into ``NVME`` (demotion)."""

    hashes: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MOST_BLOCKS)]
    tier: CacheTier


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a ``MigrateRequest`` at once: started in the background, or not there."""

    started: int
    unknown: list[str]


class QuotaBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's share of one tier, in bytes; ``burst_bytes`` null is all of the tier."""

    guaranteed_bytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)] = 0
    burst_bytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)] | None = None
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class QuotaChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``PUT /kv/v1/quotas``: one tenant's quota in one tier; null brings back what the engine was started with."""

    tenant: Annotated[str, msgspec.Meta(pattern=TENANT_PATTERN)]
    tier: CacheTier
    quota: QuotaBody | None


class TenantUsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant in one tier. ``over_burst_blocks`` counts blocks that its own burst limit pushed out or kept out;
    ``changed`` is whether its quota was set by ``PUT /kv/v1/quotas``.
    """

    used_blocks: int
    used_bytes: int
    quota: QuotaBody
    over_burst_blocks: int
    changed: bool = False


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /kv/v1/quotas``: by tier, then by tenant (``kvcontrol.core.tenant`` says how tenants are called)."""

    tiers: dict[CacheTier, dict[str, TenantUsageBody]]


class CacheReset(msgspec.Struct, frozen=True, kw_only=True):
    """``POST /kv/v1/prefix-cache/reset``: how many blocks each tier forgot; those that requests use stay in HBM."""

    dropped: dict[CacheTier, int]
