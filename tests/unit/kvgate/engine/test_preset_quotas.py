"""What a preset's quotas become for the tenants that are known when engines start."""

from dataclasses import replace

import pytest

from engines.lmdeploy.settings import EngineSettings
from kvcontrol.presets import Preset, Presets
from kvcontrol.presets.parts import QuotaPart
from kvgate.engine.preset_quotas import shares_of_preset
from kvgate.engine.tiers import TenantShares, TierOptions

NAMES = tuple(f"{number:016x}" for number in range(12))


def preset(guaranteed: float = 0.1, burst: float = 0.6) -> Preset:
    chosen = Presets.shipped().preset("long-context-32k", "cpu")
    return replace(chosen, quota=QuotaPart(guaranteed_share=guaranteed, burst_share=burst))


def test_tenants_of_a_gateway_get_what_the_preset_says() -> None:
    assert shares_of_preset(preset(), NAMES[:3]) == (TenantShares(burst=0.6, guaranteed=0.1, tenants=NAMES[:3]), [])
    assert shares_of_preset(preset(), NAMES[:10])[1] == []
    assert shares_of_preset(preset(guaranteed=0.0), NAMES) == (TenantShares(burst=0.6), [])


def test_what_cannot_be_applied_is_said() -> None:
    shares, answer = shares_of_preset(preset(), NAMES[:11])
    assert shares == TenantShares(burst=0.6)
    assert answer[0].startswith("quota.guaranteed_share (0.1) is not applied: 11 tenants with that share exceed")
    shares, answer = shares_of_preset(preset(), None)
    assert shares == TenantShares(burst=0.6)
    assert "this engine knows no tenants at its start" in answer[0]
    assert shares_of_preset(preset(), ())[1][0].startswith("its quotas are not applied: no API key names a tenant")
    assert shares_of_preset(preset(), NAMES[:1])[1][0].startswith(
        "its quotas are not applied: one tenant has an API key"
    )
    assert shares_of_preset(preset(0.0, 1.0), ()) == (TenantShares(), [])


@pytest.mark.parametrize("tenants", [None, (), NAMES[:1], NAMES[:2], NAMES[:10], NAMES])
@pytest.mark.parametrize("name", list(Presets.shipped().workloads))
def test_the_shares_of_every_preset_are_what_an_engines_settings_take(
    monkeypatch: pytest.MonkeyPatch, name: str, tenants: tuple[str, ...] | None
) -> None:
    shares, _ = shares_of_preset(Presets.shipped().preset(name, "cpu"), tenants)
    for variable, value in TierOptions(ddr_bytes=1 << 20, shares=shares).environment().items():
        monkeypatch.setenv(variable, value)
    settings = EngineSettings.load()
    assert settings.tenant_burst_share == shares.burst
    assert (settings.tenant_guaranteed_share, settings.guaranteed_names) == (shares.guaranteed, shares.tenants)
