import pytest
from pydantic import SecretStr

from gateway.admission import Authenticator
from gateway.errors import AuthenticationError
from gateway.settings import ApiKeySettings

SECRET = b"s" * 32


def closed(**tenants: str) -> Authenticator:
    keys = [ApiKeySettings(key=SecretStr(key), tenant=tenant) for key, tenant in tenants.items()]
    return Authenticator(keys, salt_secret=SECRET)


def test_keys_of_one_tenant_share_its_salt_and_tenants_share_nothing() -> None:
    keys = closed(k1="acme", k2="acme", k3="umbrella")
    one, two, three = (keys.authenticate(f"Bearer {key}".encode()) for key in ("k1", "k2", "k3"))
    assert one == two
    assert one.id == "acme"
    assert one.salt != three.salt


def test_salts_are_stable_for_a_secret_and_differ_between_secrets() -> None:
    first = Authenticator([], salt_secret=SECRET).authenticate(b"Bearer x")
    assert first == Authenticator([], salt_secret=SECRET).authenticate(b"Bearer x")
    assert first.salt != Authenticator([], salt_secret=b"t" * 32).authenticate(b"Bearer x").salt


def test_in_open_mode_every_key_is_a_tenant_and_so_is_none() -> None:
    keys = Authenticator([], salt_secret=SECRET)
    tenants = [keys.authenticate(header) for header in (None, b"Bearer a", b"bearer b", b"Basic a")]
    assert tenants[0] == tenants[3]
    assert tenants[0].id == "anonymous"
    assert len({tenant.salt for tenant in tenants}) == 3


def test_a_key_named_like_a_tenant_is_not_that_tenant() -> None:
    keys = Authenticator([], salt_secret=SECRET)
    assert keys.authenticate(b"Bearer anonymous").salt != keys.authenticate(None).salt


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        (b"", "missing_api_key"),
        (b"Bearer", "missing_api_key"),
        (b"Basic k1", "missing_api_key"),
        (b"Bearer k", "invalid_api_key"),
        (b"Bearer k1 k1", "invalid_api_key"),
        (b"Bearer \xff", "invalid_api_key"),
    ],
)
def test_anything_but_a_configured_key_is_refused_and_never_repeated(header: bytes | None, code: str) -> None:
    with pytest.raises(AuthenticationError) as refused:
        closed(k1="acme").authenticate(header)
    assert refused.value.reason == code
    assert "k1 k1" not in refused.value.message
