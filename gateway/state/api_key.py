"""API keys: made with 256 random bits, shown once, kept as a keyed digest.

    kvg-<id>-<secret>

The digest is HMAC-SHA-256 under a key that is derived from the gateway's own secret, so a copy of the store alone tells
nothing about keys, weak ones from a configuration file included; and it costs about a microsecond for each request. A
deliberately slow hash protects short passwords; there are none here.
"""

import hashlib
import hmac
import secrets
from typing import NamedTuple

_ID_BYTES = 6
_SECRET_BYTES = 32
_BLOCK_BYTES = 64


class NewKey(NamedTuple):
    """``key`` is for its owner, once; ``key_id`` names it from then on."""

    key_id: str
    key: str


def make_key() -> NewKey:
    """Return a new key."""
    key_id = secrets.token_hex(_ID_BYTES)
    return NewKey(key_id, f"kvg-{key_id}-{secrets.token_hex(_SECRET_BYTES)}")


class KeyDigest:
    """Digests of keys under one gateway secret; the same over restarts and replicas that share it.

    ``hmac.digest`` computes both hashes of HMAC (RFC 2104) from the start and takes five times as long as a copy of
    the first part.
    """

    def __init__(self, secret: bytes) -> None:
        block = hmac.digest(secret, b"kvgate.api-key", hashlib.sha256).ljust(_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(each ^ 0x36 for each in block))
        self._outer = hashlib.sha256(bytes(each ^ 0x5C for each in block))

    def of(self, key: bytes) -> bytes:
        """Return HMAC-SHA-256 of a key."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(key)
        outer.update(inner.digest())
        return outer.digest()
