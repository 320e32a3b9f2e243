"""What operators may ask of an engine's tiers: each operation parses its body, runs between two steps, and answers.

A body that can't be done as asked is refused with a message that names what was wrong and what is allowed.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from engines.control.block_list import block_list
from engines.control.operation_bodies import block_hashes, parsed
from engines.events.publisher import EventPublisher, Operation, RefusedError
from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.offload.tiers import EngineTiers
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
    QuotaChange,
)
from kvcontrol.kv_runtime import HierarchyManager, QuotaError, TenantQuota
from kvcontrol.tier_report import quotas

BLOCKS = b"blocks"
MIGRATE = b"migrate"
QUOTAS = b"quotas"
SET_QUOTA = b"set_quota"
RESET = b"reset"

_CALL_TIMEOUT_S = 1.5
"""Less than the api_server waits: a busy engine is told as busy."""

_Body = TypeVar("_Body")

_ALLOWED: Mapping[type, str] = {
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


class TierOperations:
    """The operations of one engine; ``tiers`` None is an engine without tiers, which only knows the reset of HBM."""

    def __init__(
        self, tiers: EngineTiers | None, calls: EngineCalls, *, reset: Callable[[], dict[CacheTier, int]]
    ) -> None:
        self._tiers = tiers
        self._calls = calls
        self._forget_all = reset

    def table(self) -> dict[bytes, Operation]:
        """Return all of them by name."""
        return {
            BLOCKS: self._blocks,
            MIGRATE: self._migrate,
            QUOTAS: self._quotas,
            SET_QUOTA: self._set_quota,
            RESET: self._reset,
        }

    def _blocks(self, _: EventPublisher, body: bytes) -> bytes:
        query, hierarchy = parsed(body, BlockQuery, _ALLOWED), self._hierarchy()
        return msgspec.json.encode(self._between_steps(lambda: block_list(hierarchy, query)))

    def _migrate(self, _: EventPublisher, body: bytes) -> bytes:
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

    def _quotas(self, _: EventPublisher, body: bytes) -> bytes:
        del body
        return msgspec.json.encode(quotas(self._hierarchy()))

    def _set_quota(self, _: EventPublisher, body: bytes) -> bytes:
        change = parsed(body, QuotaChange, _ALLOWED)
        hierarchy, wanted = self._hierarchy_with(change.tier), change.quota
        try:
            quota = (
                None
                if wanted is None
                else TenantQuota(
                    guaranteed_bytes=wanted.guaranteed_bytes, burst_bytes=wanted.burst_bytes, weight=wanted.weight
                )
            )
            self._between_steps(lambda: hierarchy.quotas.set(change.tenant, change.tier, quota))
        except QuotaError as error:
            raise RefusedError(str(error)) from error
        return msgspec.json.encode(quotas(hierarchy))

    def _reset(self, _: EventPublisher, body: bytes) -> bytes:
        del body
        return msgspec.json.encode(self._between_steps(lambda: CacheReset(dropped=self._forget_all())))

    def _hierarchy(self) -> HierarchyManager:
        if self._tiers is None or self._tiers.hierarchy is None:
            raise RefusedError("this instance has no tiers below HBM; start it with KVGATE_ENGINE_DDR_BYTES set")
        return self._tiers.hierarchy

    def _hierarchy_with(self, tier: CacheTier) -> HierarchyManager:
        hierarchy = self._hierarchy()
        tiers = hierarchy.stats().tiers
        if tier not in tiers:
            raise RefusedError(f"this instance has no {tier} tier; it has {', '.join(tiers)}")
        return hierarchy

    def _between_steps(self, work: Callable[[], _Body]) -> _Body:
        return self._calls(work, timeout_s=_CALL_TIMEOUT_S)


__all__ = ["BLOCKS", "MIGRATE", "QUOTAS", "RESET", "SET_QUOTA", "TierOperations"]
