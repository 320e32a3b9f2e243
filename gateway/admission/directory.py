"""Who is known: tenants, their limits and their keys, as the store has them, and the fleet's policies and pins.

Read whole, swapped whole.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from gateway.limits import UNLIMITED, TenantLimits
from gateway.problems import Problems
from gateway.state.bodies import CURRENT_PRESET, DEFAULT_QUOTA, KeyBody, PolicyBody, PresetBody, QuotaBody, TenantBody
from gateway.state.documents import Document, Kind
from gateway.state.fleet_bodies import PinBody
from gateway.state.store import Store, StoreUnavailableError
from gateway.state.stored import DocumentReader, UnreadableDocumentError, read
from gateway.types import TenantId

_Value = TypeVar("_Value")
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


class DirectoryReader:
    """Reads the directory. A document that can't be read fails alone: a key isn't accepted then, a tenant counts as
    suspended, and of all others what was read here before goes on to hold.
    """

    def __init__(self, store: Store, problems: Problems) -> None:
        self._store = store
        self._reader = DocumentReader(problems)

    async def read(self) -> Directory:
        """Read all of it; raises ``StoreUnavailableError``.

        The revision is read first: a change in between makes the next look find a newer one, and read again.
        """
        revision = await self._store.revision()
        keys = await self._store.documents(Kind.KEY)
        tenants = await self._all(Kind.TENANT, partial(read, TenantBody), otherwise=_suspended)
        limits = await self._all(Kind.QUOTA, lambda each: read(QuotaBody, each).limits())
        presets = await self._all(Kind.PRESET, partial(read, PresetBody))
        return Directory(
            revision=revision,
            keys=MappingProxyType(
                {
                    digest: key
                    for digest, key in self._reader.read(Kind.KEY, keys, _key, otherwise=lambda _: None).values()
                    if key is not None
                }
            ),
            has_keys=bool(keys),
            limits=MappingProxyType({TenantId(name): each for name, each in limits.items()}),
            default_limits=limits.get(DEFAULT_QUOTA, UNLIMITED),
            suspended=frozenset(TenantId(name) for name, each in tenants.items() if each.suspended),
            tenants=frozenset(map(TenantId, tenants)),
            preset=presets.get(CURRENT_PRESET),
            workloads=MappingProxyType({each.name: each.body for each in await self._store.documents(Kind.WORKLOAD)}),
            policies=MappingProxyType(await self._all(Kind.POLICY, partial(read, PolicyBody))),
            pins=MappingProxyType(await self._all(Kind.PIN, partial(read, PinBody))),
        )

    async def _all(
        self,
        kind: Kind,
        parse: Callable[[Document], _Value],
        *,
        otherwise: Callable[[_Value | None], _Value | None] = lambda before: before,
    ) -> dict[str, _Value]:
        return self._reader.read(kind, await self._store.documents(kind), parse, otherwise=otherwise)


def _key(document: Document) -> tuple[bytes, KnownKey | None]:
    """Return a key's digest, and the key unless it is revoked."""
    body = read(KeyBody, document)
    try:
        digest = bytes.fromhex(body.digest)
    except ValueError:
        raise UnreadableDocumentError(document, "digest: it is not hexadecimal") from None
    if body.revoked_at_s is not None:
        return digest, None
    return digest, KnownKey(tenant=TenantId(body.tenant), expires_at_s=body.expires_at_s)


def _suspended(before: TenantBody | None) -> TenantBody:
    del before
    return TenantBody(suspended=True)


class DirectoryKeeper:
    """Reads the directory anew when the store has changed, here or in another gateway, and tells ``publish``."""

    def __init__(self, store: Store, publish: Callable[[Directory], None], problems: Problems) -> None:
        self._store = store
        self._reader = DirectoryReader(store, problems)
        self._publish = publish
        self.current = Directory()

    async def refresh(self) -> None:
        """Bring it up to date; raises ``StoreUnavailableError``, and what is known stays as it was."""
        if self.current.revision != await self._store.revision():
            self.current = await self._reader.read()
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


__all__ = ["Directory", "DirectoryKeeper", "KnownKey"]
