"""Who is known: tenants, their limits and their keys, as the store has them, and the fleet's policies and pins.

Read whole, swapped whole.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gateway.limits import UNLIMITED, TenantLimits
from gateway.state.bodies import CURRENT_PRESET, DEFAULT_QUOTA, KeyBody, PolicyBody, PresetBody, QuotaBody, TenantBody
from gateway.state.documents import Kind
from gateway.state.fleet_bodies import PinBody
from gateway.state.store import Store, StoreUnavailableError
from gateway.types import TenantId

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """An API key that is good, until ``expires_at_s``."""

    tenant: TenantId
    expires_at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """One revision of what the store says. ``keys`` are by digest; ``has_keys`` counts revoked ones, too.
    ``workloads`` are the presets that operators made, as they wrote them.
    """

    revision: int = 0
    keys: Mapping[bytes, KnownKey] = field(default_factory=lambda: MappingProxyType({}))
    has_keys: bool = False
    limits: Mapping[TenantId, TenantLimits] = field(default_factory=lambda: MappingProxyType({}))
    default_limits: TenantLimits = UNLIMITED
    suspended: frozenset[TenantId] = frozenset()
    tenants: frozenset[TenantId] = frozenset()
    preset: PresetBody | None = None
    workloads: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    policies: Mapping[str, PolicyBody] = field(default_factory=lambda: MappingProxyType({}))
    pins: Mapping[str, PinBody] = field(default_factory=lambda: MappingProxyType({}))

    def limits_of(self, tenant: TenantId) -> TenantLimits:
        return self.limits.get(tenant, self.default_limits)


async def read_directory(store: Store) -> Directory:
    """Read all of it; raises ``StoreUnavailableError``.

    The revision is read first: a change in between makes the next look find a newer one, and read again.
    """
    revision = await store.revision()
    limits = {
        TenantId(each.name): QuotaBody.model_validate_json(each.body).limits()
        for each in await store.documents(Kind.QUOTA)
    }
    tenants = await store.documents(Kind.TENANT)
    suspended = frozenset(
        TenantId(each.name) for each in tenants if TenantBody.model_validate_json(each.body).suspended
    )
    preset = await store.document(Kind.PRESET, CURRENT_PRESET)
    keys = [KeyBody.model_validate_json(each.body) for each in await store.documents(Kind.KEY)]
    return Directory(
        revision=revision,
        keys=MappingProxyType(
            {
                bytes.fromhex(each.digest): KnownKey(tenant=TenantId(each.tenant), expires_at_s=each.expires_at_s)
                for each in keys
                if each.revoked_at_s is None
            }
        ),
        has_keys=bool(keys),
        limits=MappingProxyType(limits),
        default_limits=limits.get(TenantId(DEFAULT_QUOTA), UNLIMITED),
        suspended=suspended,
        tenants=frozenset(TenantId(each.name) for each in tenants),
        preset=None if preset is None else PresetBody.model_validate_json(preset.body),
        workloads=MappingProxyType({each.name: each.body for each in await store.documents(Kind.WORKLOAD)}),
        policies=MappingProxyType(
            {each.name: PolicyBody.model_validate_json(each.body) for each in await store.documents(Kind.POLICY)}
        ),
        pins=MappingProxyType(
            {each.name: PinBody.model_validate_json(each.body) for each in await store.documents(Kind.PIN)}
        ),
    )


class DirectoryKeeper:
    """Reads the directory anew when the store has changed, here or in another gateway, and tells ``publish``."""

    def __init__(self, store: Store, publish: Callable[[Directory], None]) -> None:
        self._store = store
        self._publish = publish
        self.current = Directory()

    async def refresh(self) -> None:
        """Bring it up to date; raises ``StoreUnavailableError``, and what is known stays as it was."""
        if self.current.revision != await self._store.revision():
            self.current = await read_directory(self._store)
            self._publish(self.current)

    async def run(self, interval_s: float) -> None:
        """Look again and again, for ever. While the store is away, what is known holds."""
        away = False
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.refresh()
            except StoreUnavailableError as error:
                if not away:
                    _log.warning("tenants, keys and quotas stay as they are known: %s", error)
                away = True
            else:
                away = False


__all__ = ["Directory", "DirectoryKeeper", "KnownKey", "read_directory"]
