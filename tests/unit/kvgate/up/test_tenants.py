"""What a preset's quotas become for the tenants that are known when engines start."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines.lmdeploy.settings import EngineSettings
from gateway.admission.authenticator import Authenticator
from gateway.settings import ApiKeySettings
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.presets import Preset, Presets
from kvcontrol.presets.parts import QuotaPart
from kvgate.engine.tiers import TenantShares, TierOptions
from kvgate.failure import CommandError
from kvgate.up.api_keys import ApiKey
from kvgate.up.stack import GatewayOptions, Routing
from kvgate.up.tenants import shares_of_preset, tenants_of_keys

NAMES = tuple(f"{number:016x}" for number in range(12))


def gateway(folder: Path, *keys: str) -> GatewayOptions:
    return GatewayOptions(
        host="127.0.0.1",
        port=1,
        api_keys=tuple(ApiKey.parse(key) for key in keys),
        routing=Routing.COST_AWARE,
        state_dir=folder,
    )


def preset(guaranteed: float = 0.1, burst: float = 0.6) -> Preset:
    chosen = Presets.shipped().preset("long-context-32k", "cpu")
    return replace(chosen, quota=QuotaPart(guaranteed_share=guaranteed, burst_share=burst))


def test_a_keys_tenant_is_called_as_engines_account_for_it(tmp_path: Path) -> None:
    secret = "a secret of 16 characters"  # noqa: S105 - of this test
    names = tenants_of_keys(gateway(tmp_path, "acme:k1", "acme:k2", "umbra:k3"), {"KVGATE_SALT_SECRET": secret})
    keys = [
        ApiKeySettings.model_validate({"key": key, "tenant": name}) for key, name in (("1", "acme"), ("2", "umbra"))
    ]
    served = Authenticator(keys, salt_secret=secret.encode())
    assert names == tuple(tenant_of_salt(served.authenticate([key]).salt) for key in (b"1", b"2"))


def test_without_a_secret_the_state_folders_is_used_as_the_gateway_will(tmp_path: Path) -> None:
    options = gateway(tmp_path, "acme:k1", "umbra:k2")
    assert tenants_of_keys(options, {}) == tenants_of_keys(options, {})
    assert len(tenants_of_keys(options, {})) == 2
    assert tenants_of_keys(gateway(tmp_path / "other", "acme:k1"), {}) != tenants_of_keys(options, {})[:1]


def test_where_any_key_is_accepted_nobody_is_named(tmp_path: Path) -> None:
    assert tenants_of_keys(gateway(tmp_path), {}) == ()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_a_tenant_or_a_key_is_said(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="a tenant is 1 to 64 of"):
        tenants_of_keys(gateway(tmp_path, "a tenant:k1"), {})
    with pytest.raises(CommandError, match="begins or ends with a space"):
        tenants_of_keys(gateway(tmp_path, "acme: k1"), {})
    (tmp_path / "salt.secret").write_text("short")
    with pytest.raises(CommandError, match=r"salt\.secret"):
        tenants_of_keys(gateway(tmp_path, "acme:k1"), {})


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
