import pytest
from pydantic import SecretStr

from gateway.admission import Authenticator, Directory
from gateway.errors import AuthenticationError
from gateway.settings import ApiKeySettings

SECRET = b"s" * 32


def closed(**tenants: str) -> Authenticator:
    keys = [ApiKeySettings(key=SecretStr(key), tenant=tenant) for key, tenant in tenants.items()]
    return Authenticator(keys, salt_secret=SECRET)


def test_keys_of_one_tenant_share_its_salt_and_tenants_share_nothing() -> None:
    keys = closed(k1="acme", k2="acme", k3="umbrella")
    one, two, three = (keys.authenticate([key.encode()]) for key in ("k1", "k2", "k3"))
    assert one == two
    assert one.id == "acme"
    assert one.salt != three.salt


def test_salts_are_stable_for_a_secret_and_differ_between_secrets() -> None:
    first = Authenticator([], salt_secret=SECRET).authenticate([b"x"])
    assert first == Authenticator([], salt_secret=SECRET).authenticate([b"x"])
    assert first.salt != Authenticator([], salt_secret=b"t" * 32).authenticate([b"x"]).salt


def test_in_open_mode_every_key_is_a_tenant_and_so_is_none() -> None:
    keys = Authenticator([], salt_secret=SECRET)
    tenants = [keys.authenticate(each) for each in ([], [b"a"], [b"b"])]
    assert tenants[0].id == "anonymous"
    assert len({tenant.salt for tenant in tenants}) == 3


def test_an_empty_store_after_one_with_keys_does_not_open_the_gateway() -> None:
    keys = Authenticator([], salt_secret=SECRET)
    assert keys.open
    keys.publish(Directory(has_keys=True))
    keys.publish(Directory())
    assert not keys.open
    with pytest.raises(AuthenticationError):
        keys.authenticate([b"any"])


def test_a_key_named_like_a_tenant_is_not_that_tenant() -> None:
    keys = Authenticator([], salt_secret=SECRET)
    assert keys.authenticate([b"anonymous"]).salt != keys.authenticate([]).salt


@pytest.mark.parametrize(
    ("given", "code"),
    [([], "missing_api_key"), *(([key], "invalid_api_key") for key in (b"k", b"k1 k1", b"\xff", b"Basic k1", b"K1"))],
)
def test_anything_but_a_configured_key_is_refused_and_never_repeated(given: list[bytes], code: str) -> None:
    with pytest.raises(AuthenticationError) as refused:
        closed(k1="acme").authenticate(given)
    assert refused.value.reason == code
    assert "k1 k1" not in refused.value.message


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([b"k1", b"other"], None),
        ([b"other", b"k1"], "invalid_api_key"),
        ([b"k1", b"k2"], "ambiguous_api_key"),
        ([b"k1", b"other", b"k3"], "ambiguous_api_key"),
        ([b"other", b"another"], "invalid_api_key"),
    ],
)
def test_the_first_key_counts_and_no_second_one_may_be_known(given: list[bytes], code: str | None) -> None:
    keys = closed(k1="acme", k2="umbra", k3="acme")
    if code is None:
        assert keys.authenticate(given).id == "acme"
        return
    with pytest.raises(AuthenticationError) as refused:
        keys.authenticate(given)
    assert refused.value.reason == code


def test_in_open_mode_two_keys_are_two_tenants_and_refused() -> None:
    with pytest.raises(AuthenticationError) as refused:
        Authenticator([], salt_secret=SECRET).authenticate([b"a", b"b"])
    assert refused.value.reason == "ambiguous_api_key"
