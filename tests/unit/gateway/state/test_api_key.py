import hashlib
import hmac

import pytest

from gateway.state import KeyDigest, make_key


def test_keys_are_long_and_never_the_same() -> None:
    made = [make_key() for _ in range(100)]
    assert len({each.key for each in made}) == len({each.key_id for each in made}) == 100
    assert all(each.key.startswith(f"kvg-{each.key_id}-") and len(each.key) > 64 for each in made)


def test_a_digest_is_stable_for_a_secret_and_says_nothing_under_another() -> None:
    digest = KeyDigest(b"s" * 32).of(b"key")
    assert digest == KeyDigest(b"s" * 32).of(b"key")
    assert digest != KeyDigest(b"t" * 32).of(b"key")
    assert b"key" not in digest


@pytest.mark.parametrize("key", [b"", b"key", b"k" * 63, b"k" * 64, b"k" * 1000])
def test_digests_are_those_of_hmac_as_stores_have_them(key: bytes) -> None:
    pepper = hmac.digest(b"s" * 32, b"kvgate.api-key", hashlib.sha256)
    digest = KeyDigest(b"s" * 32)
    assert [digest.of(key), digest.of(key)] == [hmac.digest(pepper, key, hashlib.sha256)] * 2
