"""From an API key to a tenant, its limits and its salt.

Keys are looked up by a keyed digest, so the time of a look-up says nothing about how close a guess was. Known are those
of the settings and those of the store. As long as there has never been one, the gateway is open: every key is a tenant
of its own, and so is "no key". Two keys of different tenants never share cached blocks in either mode.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from time import time
from types import MappingProxyType

from gateway.admission.directory import Directory
from gateway.errors import AuthenticationError, NoInstanceError, PermissionDeniedError
from gateway.settings import ApiKeySettings
from gateway.state.api_key import KeyDigest
from gateway.types import Tenant, TenantId
from kvcontrol.series import MOST_TENANTS, OTHER

_SALT_HEX_CHARS = 32
_RETRY_AFTER_S = 2
_ANONYMOUS = TenantId("anonymous")


class Authenticator:
    """Holds digests of keys. O(1) for each request; ``publish`` replaces all keys in one step."""

    def __init__(
        self,
        keys: Iterable[ApiKeySettings],
        *,
        salt_secret: bytes,
        require_keys: bool = False,
        admin_key: str | None = None,
        clock: Callable[[], float] = time,
    ) -> None:
        self._secret = salt_secret
        self._salts = lru_cache(maxsize=4096)(self._derived_salt)
        self._digest = KeyDigest(salt_secret)
        self._configured = {
            self._digest.of(each.key.get_secret_value().encode()): TenantId(each.tenant) for each in keys
        }
        self._require_keys = require_keys
        self._admin = None if admin_key is None else self._digest.of(admin_key.encode())
        self._clock = clock
        self._directory = Directory()
        self._tenants: dict[bytes, tuple[Tenant, float | None]] = {}
        self._unconfirmed: frozenset[bytes] = frozenset()
        self.open = False
        """Whether any key is accepted; read for every request, and it changes with ``publish`` alone."""
        self.accounts: Mapping[TenantId, Tenant] = {}
        """Tenants that are known by name, the first hundred of them: those that metrics may name."""
        self.publish(Directory())

    def publish(self, directory: Directory) -> None:
        """Replace the keys by those of the store."""
        made: dict[TenantId, Tenant] = {}

        def tenant(name: TenantId) -> Tenant:
            if name not in made:
                made[name] = self._tenant(name, directory)
            return made[name]

        known = {digest: (tenant(name), None) for digest, name in self._configured.items()}
        stored = {digest: (tenant(each.tenant), each.expires_at_s) for digest, each in directory.keys.items()}
        self._directory, self._tenants, self._unconfirmed = directory, stored | known, frozenset()
        self._require_keys = self._require_keys or directory.has_keys  # for good: an empty store may replace this one
        self.open = not (self._require_keys or self._configured)
        names = sorted({*self.configured, *directory.tenants, *(each.tenant for each in directory.keys.values())})
        named = [each for each in ([_ANONYMOUS, *names] if self.open else names) if each != OTHER]
        self.accounts = MappingProxyType({name: tenant(name) for name in named[:MOST_TENANTS]})

    def distrust(self) -> None:
        """Refuse stored keys until the next ``publish``: whether they are still good is not known."""
        self._unconfirmed = frozenset(self._tenants.keys() - self._configured.keys())
        self._tenants = {digest: found for digest, found in self._tenants.items() if digest in self._configured}

    @property
    def confirmed(self) -> bool:
        """Whether stored keys are accepted."""
        return not self._unconfirmed

    def authenticate(self, keys: Sequence[bytes]) -> Tenant:
        """Return the tenant of these keys: the first known key counts.

        Raises ``AuthenticationError`` when that is nobody known, or when another one is known as well: then nobody can
        tell whose request it is. ``PermissionDeniedError`` when the tenant is suspended, ``NoInstanceError`` for a
        stored key after ``distrust``.
        """
        key = keys[0] if keys else None
        digest = None if key is None else self._digest.of(key)
        if digest is not None and self._admin is not None and hmac.compare_digest(digest, self._admin):
            raise AuthenticationError("this is the admin key; inference takes a tenant's key")
        tenant = self._open_tenant(key) if self.open else self._known_tenant(digest)
        if len(keys) > 1 and any(self.open or self._digest.of(each) in self._tenants for each in keys[1:]):
            raise AuthenticationError(
                "this request has two different API keys that are known; send one of them, as Authorization: Bearer "
                "<key> or as x-api-key: <key>",
                code="ambiguous_api_key",
            )
        if tenant.id in self._directory.suspended:
            raise PermissionDeniedError("this tenant is suspended", code="tenant_suspended")
        return tenant

    @property
    def several(self) -> bool:
        """Whether requests of more than one tenant may come: in the open mode every key is one."""
        return self.open or len({tenant.id for tenant, _ in self._tenants.values()}) > 1

    @property
    def configured(self) -> frozenset[TenantId]:
        """The tenants of the settings' keys."""
        return frozenset(self._configured.values())

    @property
    def configured_keys(self) -> Sequence[TenantId]:
        """The tenant of each key of the settings, sorted."""
        return sorted(self._configured.values())

    def knows(self, tenant: TenantId) -> bool:
        """Whether the settings have a key of this tenant."""
        return tenant in self._configured.values()

    def suspended(self, tenant: TenantId) -> bool:
        """Whether a tenant's requests are refused."""
        return tenant in self._directory.suspended

    def digest(self, key: str) -> str:
        """Return the digest of a key for the store."""
        return self._digest.of(key.encode()).hex()

    def salt(self, tenant: TenantId) -> str:
        """Return the salt that roots a tenant's blocks; the latest few thousand are remembered."""
        return self._salts(tenant)

    def _derived_salt(self, tenant: TenantId) -> str:
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()[:_SALT_HEX_CHARS]

    def _open_tenant(self, key: bytes | None) -> Tenant:
        if key is None and (anonymous := self.accounts.get(_ANONYMOUS)) is not None:
            return anonymous
        name = _ANONYMOUS if key is None else TenantId("open:" + hashlib.sha256(key).hexdigest()[:16])
        return self._tenant(name, self._directory)

    def _known_tenant(self, digest: bytes | None) -> Tenant:
        if digest is None:
            raise AuthenticationError("no API key; send the header Authorization: Bearer <key>", code="missing_api_key")
        found = self._tenants.get(digest)
        if found is None:
            if digest in self._unconfirmed:
                raise NoInstanceError(
                    "this API key can't be verified now: the store can't be reached; try again later",
                    code="keys_unconfirmed",
                    retry_after_s=_RETRY_AFTER_S,
                )
            raise AuthenticationError("this API key is not known here")
        tenant, expires_at_s = found
        if expires_at_s is not None and self._clock() >= expires_at_s:
            raise AuthenticationError("this API key has expired", code="expired_api_key")
        return tenant

    def _tenant(self, name: TenantId, directory: Directory) -> Tenant:
        return Tenant(id=name, salt=self.salt(name), limits=directory.limits_of(name))
