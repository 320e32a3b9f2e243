"""Names of a gateway's tenants as engines account for them."""

from pathlib import Path

import pytest

from gateway.admission.authenticator import Authenticator
from gateway.settings import ApiKeySettings
from kvcontrol.core.tenant import tenant_of_salt
from kvgate.failure import CommandError
from kvgate.up.api_keys import ApiKey
from kvgate.up.stack import GatewayOptions, Routing
from kvgate.up.tenants import tenants_of_keys


def gateway(folder: Path, *keys: str) -> GatewayOptions:
    return GatewayOptions(
        host="127.0.0.1",
        port=1,
        api_keys=tuple(ApiKey.parse(key) for key in keys),
        routing=Routing.COST_AWARE,
        state_dir=folder,
    )


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
