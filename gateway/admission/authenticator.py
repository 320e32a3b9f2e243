"""From an API key to a tenant and its salt.

Keys are looked up by their SHA-256, so the time of a look-up says nothing about how close a guess was. In open mode
every key is a tenant of its own, and so is "no key": two keys never share cached blocks in either mode.
"""

import hashlib
import hmac
from collections.abc import Iterable

from gateway.errors import AuthenticationError
from gateway.settings import ApiKeySettings
from gateway.types import Tenant, TenantId

_SALT_HEX_CHARS = 32
_ANONYMOUS = TenantId("anonymous")


class Authenticator:
    """Holds hashes of the configured keys. O(1) for each request."""

    def __init__(self, keys: Iterable[ApiKeySettings], *, salt_secret: bytes) -> None:
        self._secret = salt_secret
        self._tenants = {
            hashlib.sha256(each.key.get_secret_value().encode()).digest(): self._tenant(TenantId(each.tenant))
            for each in keys
        }
        self._anonymous = self._tenant(_ANONYMOUS)

    def authenticate(self, authorization: bytes | None) -> Tenant:
        """Return who sent this ``Authorization`` header; raises ``AuthenticationError`` when that is nobody known."""
        key = _bearer(authorization)
        if not self._tenants:
            if key is None:
                return self._anonymous
            return self._tenant(TenantId("open:" + hashlib.sha256(key).hexdigest()[:16]))
        if key is None:
            raise AuthenticationError("no API key; send the header Authorization: Bearer <key>", code="missing_api_key")
        tenant = self._tenants.get(hashlib.sha256(key).digest())
        if tenant is None:
            raise AuthenticationError("this API key is not known here")
        return tenant

    def _tenant(self, tenant: TenantId) -> Tenant:
        salt = hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()[:_SALT_HEX_CHARS]
        return Tenant(id=tenant, salt=salt)


def _bearer(authorization: bytes | None) -> bytes | None:
    if authorization is None:
        return None
    scheme, _, key = authorization.strip().partition(b" ")
    return (key.strip() or None) if scheme.lower() == b"bearer" else None


__all__ = ["Authenticator"]
