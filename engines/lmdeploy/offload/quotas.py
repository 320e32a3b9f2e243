"""From settings to quotas: shares of a tier become bytes once the tier's size is known."""

from collections.abc import Mapping

from engines.lmdeploy.settings import EngineSettings
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.tenant import SHARED_TENANT
from kvcontrol.kv_runtime import NO_QUOTA, QuotaManager, TenantQuota


def build_quotas(
    settings: EngineSettings, capacity_blocks: Mapping[CacheTier, int], *, block_bytes: int
) -> QuotaManager:
    """Return the accounts of an engine's tiers, with the configured burst for everybody and the guarantees.

    Shares are rounded down to whole blocks, a burst to one at least. Requests without a salt are nobody's: no burst
    holds for them together, and they give way to tenants as any large tenant does.
    """
    bursts = {tier: _burst(settings, blocks) for tier, blocks in capacity_blocks.items()}
    quotas = QuotaManager(
        defaults={
            tier: TenantQuota(burst_bytes=blocks * block_bytes)
            for tier, blocks in bursts.items()
            if blocks < capacity_blocks[tier]
        }
    )
    for tier, blocks in capacity_blocks.items():
        burst_bytes = bursts[tier] * block_bytes if bursts[tier] < blocks else None
        guaranteed_bytes = int(settings.tenant_guaranteed_share * blocks) * block_bytes
        if burst_bytes is not None:
            quotas.set(SHARED_TENANT, tier, NO_QUOTA)
        for tenant in settings.guaranteed_names:
            burst = None if tenant == SHARED_TENANT else burst_bytes
            quotas.set(tenant, tier, TenantQuota(guaranteed_bytes=guaranteed_bytes, burst_bytes=burst))
    return quotas


def _burst(settings: EngineSettings, blocks: int) -> int:
    return max(1, int(settings.tenant_burst_share * blocks))
