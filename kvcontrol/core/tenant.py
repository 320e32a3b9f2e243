"""A tenant as the engine side knows it: by a digest of its salt, since the salt itself is a secret."""

from hashlib import blake2b

_DIGEST_BYTES = 8

SHARED_TENANT = "shared"
"""Who unsalted requests are accounted to."""

TENANT_PATTERN = rf"^({SHARED_TENANT}|[0-9a-f]{{{2 * _DIGEST_BYTES}}})\Z"
"""What a tenant's name looks like: a quota for any other name would never be anybody's."""


def tenant_of_salt(salt: str) -> str:
    """Return the name under which KV is accounted to a salt's tenant: 16 hex digits, ``SHARED_TENANT`` without salt."""
    if not salt:
        return SHARED_TENANT
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"kvgate.tenant").hexdigest()
