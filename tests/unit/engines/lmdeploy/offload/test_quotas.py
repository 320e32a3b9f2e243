"""Shares of a tier become quotas of its tenants."""

from engines.lmdeploy.offload.quotas import build_quotas
from engines.lmdeploy.settings import EngineSettings
from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import NO_QUOTA, TenantQuota

DDR, NVME = CacheTier.DDR, CacheTier.NVME
A, B = "a" * 16, "b" * 16


def test_without_settings_every_tenant_may_fill_every_tier() -> None:
    quotas = build_quotas(EngineSettings(), {DDR: 100, NVME: 1000}, block_bytes=10)
    assert quotas.get(A, DDR) == quotas.get("shared", NVME) == NO_QUOTA


def test_shares_are_of_each_tier_in_whole_blocks() -> None:
    settings = EngineSettings(tenant_burst_share=0.25, tenant_guaranteed_share=0.1, guaranteed_tenants=f"{A}, {B}")
    quotas = build_quotas(settings, {DDR: 99, NVME: 1000}, block_bytes=10)
    assert quotas.get(A, DDR) == quotas.get(B, DDR) == TenantQuota(guaranteed_bytes=90, burst_bytes=240)
    assert quotas.get(A, NVME) == TenantQuota(guaranteed_bytes=1000, burst_bytes=2500)
    assert quotas.get("c" * 16, DDR) == TenantQuota(burst_bytes=240)
    for tier, blocks in ((DDR, 99), (NVME, 1000)):
        quotas.open_tier(tier, capacity_blocks=blocks, block_bytes=10)
    assert quotas.may_use("c" * 16, DDR, 50).blocks == 24


def test_requests_without_a_tenant_have_no_burst() -> None:
    quotas = build_quotas(EngineSettings(tenant_burst_share=0.5), {DDR: 100}, block_bytes=10)
    quotas.open_tier(DDR, capacity_blocks=100, block_bytes=10)
    assert quotas.may_use("shared", DDR, 100).blocks == 100
    settings = EngineSettings(tenant_burst_share=0.5, tenant_guaranteed_share=0.2, guaranteed_tenants="shared")
    assert build_quotas(settings, {DDR: 100}, block_bytes=10).get("shared", DDR) == TenantQuota(guaranteed_bytes=200)


def test_a_share_of_less_than_a_block_still_lets_a_tenant_in() -> None:
    quotas = build_quotas(EngineSettings(tenant_burst_share=0.01), {DDR: 10}, block_bytes=10)
    assert quotas.get(A, DDR) == TenantQuota(burst_bytes=10)


def test_guarantees_of_a_whole_tier_fit_it() -> None:
    names = [f"{number:016x}" for number in range(10)]
    settings = EngineSettings(tenant_guaranteed_share=0.1, guaranteed_tenants=",".join(names))
    for blocks in (10, 37, 64, 1001):
        quotas = build_quotas(settings, {DDR: blocks}, block_bytes=10)
        quotas.open_tier(DDR, capacity_blocks=blocks, block_bytes=10)
        assert quotas.get(names[-1], DDR).guaranteed_bytes == int(0.1 * blocks) * 10
