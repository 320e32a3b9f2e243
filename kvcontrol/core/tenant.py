"""A tenant as the engine side knows it: by a digest of its salt, since the salt itself is a secret."""

from hashlib import blake2b

_DIGEST_BYTES = 8

SHARED_TENANT = "shared"
"""Who unsalted requests are accounted to."""


def tenant_of_salt(salt: str) -> str:
    """Return the name under which KV is accounted to a salt's tenant: 16 hex digits, ``SHARED_TENANT`` without salt."""
    if not salt:
        return SHARED_TENANT
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"kvgate.tenant").hexdigest()


__all__ = ["SHARED_TENANT", "tenant_of_salt"]
