"""Operators' calls about an engine's tiers: each parses its body, runs between two steps, and answers.

A body that can't be done as asked is refused with a message that names what was wrong and what is allowed.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec

from engines.control.block_list import block_list
from engines.control.calls import CALL_TIMEOUT_S, CallEngine
from engines.control.errors import RefusedError
from engines.control.operation_bodies import block_hashes, parsed
from engines.control.operations import BLOCKS, MIGRATE, QUOTAS, RESET, SET_QUOTA, Operation
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import HASH_BYTES
from kvcontrol.core.tenant import SHARED_TENANT
from kvcontrol.core.tier_control import (
    MOST_BLOCKS,
    MOST_BYTES,
    BlockQuery,
    CacheReset,
    MigrateRequest,
    Migration,
    QuotaBody,
    QuotaChange,
)
from kvcontrol.kv_runtime import HierarchyManager, QuotaError, TenantQuota
from kvcontrol.tier_report import quotas

_Answer = TypeVar("_Answer")

_ALLOWED: Final[Mapping[type, str]] = {
    BlockQuery: f"limit (1 to {MOST_BLOCKS}), tier (DDR or NVME) and tenant (a name of /kv/v1/quotas); none is needed",
    MigrateRequest: (
        f"hashes (1 to {MOST_BLOCKS} names of blocks, {2 * HASH_BYTES} hex digits each) and tier (DDR or NVME)"
    ),
    QuotaChange: (
        f"tenant ({SHARED_TENANT}, or a digest of a salt: 16 hex digits), tier (DDR or NVME) and quota: null, or "
        f"guaranteed_bytes (0 to {MOST_BYTES}), burst_bytes (from guaranteed_bytes to {MOST_BYTES}, or null) and "
        "weight (above 0)"
    ),
}


class TierControl:
    """The tier operations of one engine; one without tiers only knows the reset of its own memory.

    ``remedy`` is how to start such an engine with tiers, ``reset`` forgets all that no request uses and returns how
    many blocks of each tier. ``unit_bytes`` is what the runtime takes for one byte (a simulated engine's blocks).
    """

    def __init__(
        self,
        hierarchy: Callable[[], HierarchyManager | None],
        call: CallEngine,
        *,
        reset: Callable[[], dict[CacheTier, int]],
        remedy: str,
        unit_bytes: int = 1,
    ) -> None:
        self._found = hierarchy
        self._call = call
        self._forget_all = reset
        self._remedy = remedy
        self._unit_bytes = unit_bytes
        self._changed_quotas: dict[tuple[str, CacheTier], QuotaBody] = {}
        """Quotas as they were set, before they were rounded to the runtime's unit."""

    def table(self) -> dict[bytes, Operation]:
        """Return the operations by name."""
        return {
            BLOCKS: self._blocks,
            MIGRATE: self._migrate,
            QUOTAS: self._quotas,
            SET_QUOTA: self._set_quota,
            RESET: self._reset,
        }

    def _blocks(self, body: bytes) -> bytes:
        query, hierarchy = parsed(body, BlockQuery, _ALLOWED), self._hierarchy()
        listed = self._between_steps(lambda: block_list(hierarchy, query, unit_bytes=self._unit_bytes))
        return msgspec.json.encode(listed)

    def _migrate(self, body: bytes) -> bytes:
        request = parsed(body, MigrateRequest, _ALLOWED)
        hierarchy = self._hierarchy_with(request.tier)
        keys = block_hashes(request.hashes)

        def migrate() -> Migration:
            found = {key: hierarchy.find(key) for key in dict.fromkeys(keys)}
            ids = [block_id for block_id in found.values() if block_id is not None]
            if ids:
                (hierarchy.prefetch if request.tier is CacheTier.DDR else hierarchy.demote)(ids)
            unknown = [key.hex() for key, block_id in found.items() if block_id is None]
            return Migration(started=len(ids), unknown=unknown)

        return msgspec.json.encode(self._between_steps(migrate))

    def _quotas(self, _: bytes) -> bytes:
        hierarchy = self._hierarchy()
        exact = {
            key: body
            for key, body in self._changed_quotas.copy().items()
            if hierarchy.quotas.get(*key) == quota_of(body, self._unit_bytes)
        }
        return msgspec.json.encode(quotas(hierarchy, unit_bytes=self._unit_bytes, exact=exact))

    def _set_quota(self, body: bytes) -> bytes:
        change = parsed(body, QuotaChange, _ALLOWED)
        hierarchy = self._hierarchy_with(change.tier)
        try:
            quota = None if change.quota is None else quota_of(change.quota, self._unit_bytes)
            self._between_steps(lambda: hierarchy.quotas.set(change.tenant, change.tier, quota))
        except QuotaError as error:
            raise RefusedError(str(error)) from error
        if change.quota is None:
            self._changed_quotas.pop((change.tenant, change.tier), None)
        else:
            self._changed_quotas[change.tenant, change.tier] = change.quota
        return self._quotas(b"")

    def _reset(self, _: bytes) -> bytes:
        return msgspec.json.encode(self._between_steps(lambda: CacheReset(dropped=self._forget_all())))

    def _hierarchy(self) -> HierarchyManager:
        hierarchy = self._found()
        if hierarchy is None:
            raise RefusedError(f"this instance has no tiers below HBM; {self._remedy}")
        return hierarchy

    def _hierarchy_with(self, tier: CacheTier) -> HierarchyManager:
        hierarchy = self._hierarchy()
        tiers = hierarchy.stats().tiers
        if tier not in tiers:
            raise RefusedError(f"this instance has no {tier} tier; it has {', '.join(tiers)}")
        return hierarchy

    def _between_steps(self, work: Callable[[], _Answer]) -> _Answer:
        return self._call(work, timeout_s=CALL_TIMEOUT_S)


def quota_of(body: QuotaBody, unit_bytes: int) -> TenantQuota:
    """Return a quota in the runtime's unit; raises ``QuotaError`` for a burst below the guarantee.

    Guarantees are rounded up to whole units. Bursts are rounded down, but not below the guarantee.
    """
    exact = TenantQuota(guaranteed_bytes=body.guaranteed_bytes, burst_bytes=body.burst_bytes, weight=body.weight)
    guaranteed = -(-exact.guaranteed_bytes // unit_bytes)
    burst = None if exact.burst_bytes is None else max(guaranteed, exact.burst_bytes // unit_bytes)
    return TenantQuota(guaranteed_bytes=guaranteed, burst_bytes=burst, weight=exact.weight)
