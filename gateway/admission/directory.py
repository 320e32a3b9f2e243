"""Tenants, limits and keys from the store, with the fleet's instances, routing, policies and pins.

Read whole by one statement, swapped whole: a slow database delays a revoked key by one answer.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from gateway.limits import UNLIMITED, TenantLimits
from gateway.problems import ProblemKind, Problems
from gateway.state.bodies import CURRENT_PRESET, DEFAULT_QUOTA, KeyBody, PolicyBody, PresetBody, QuotaBody, TenantBody
from gateway.state.documents import Document, Kind, Revision
from gateway.state.fleet_bodies import ROUTING_NAME, InstanceBody, PinBody, RoutingBody
from gateway.state.revocation import is_revoked
from gateway.state.shared_clock import MOST_SKEW_S, SharedClock
from gateway.state.store import Store, StoreUnavailableError
from gateway.state.stored import DocumentReader, UnreadableDocumentError, read, read_in_part
from gateway.types import TenantId

_KINDS = tuple(Kind)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """A valid API key, until ``expires_at_s``."""

    tenant: TenantId
    expires_at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """One revision of the store's content. ``keys`` are by digest; ``has_keys`` counts revoked ones, too.
    ``workloads`` are the presets that operators made, as they wrote them. ``whole`` is whether all documents could be
    read.
    """

    revision: Revision = field(default_factory=Revision)
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
    instances: Mapping[str, InstanceBody] = field(default_factory=lambda: MappingProxyType({}))
    routing: RoutingBody | None = None
    whole: bool = True

    def limits_of(self, tenant: TenantId) -> TenantLimits:
        return self.limits.get(tenant, self.default_limits)


class DirectoryReader:
    """Reads the directory. A document that can't be read fails alone.

    Of tenants, keys and quotas the readable fields stay in force. A tenant is suspended, a key refused, and an instance
    drained, where the field that decides it can't be read. Of all other documents the last version that was read here
    stays in force.
    """

    def __init__(self, problems: Problems) -> None:
        self._reader = DocumentReader(problems)

    def read(self, revision: Revision, documents: Mapping[Kind, Sequence[Document]]) -> Directory:
        """Return the directory of these documents."""
        keys = documents[Kind.KEY]
        tenants = self._reader.read(
            Kind.TENANT, documents[Kind.TENANT], partial(read, TenantBody), otherwise=_tenant_in_part
        )
        quotas = self._reader.read(
            Kind.QUOTA, documents[Kind.QUOTA], partial(read, QuotaBody), otherwise=partial(read_in_part, QuotaBody)
        )
        presets = self._reader.read(Kind.PRESET, documents[Kind.PRESET], partial(read, PresetBody))
        policies = self._reader.read(Kind.POLICY, documents[Kind.POLICY], partial(read, PolicyBody))
        pins = self._reader.read(Kind.PIN, documents[Kind.PIN], partial(read, PinBody))
        instances = self._reader.read(
            Kind.INSTANCE, documents[Kind.INSTANCE], partial(read, InstanceBody), otherwise=_instance_in_part
        )
        routing = self._reader.read(Kind.ROUTING, documents[Kind.ROUTING], partial(read, RoutingBody))
        limits = {name: each.limits() for name, each in quotas.items()}
        return Directory(
            revision=revision,
            keys=MappingProxyType(
                {
                    digest: key
                    for digest, key in self._reader.read(Kind.KEY, keys, _key, otherwise=_key_in_part).values()
                    if key is not None
                }
            ),
            has_keys=bool(keys),
            limits=MappingProxyType({TenantId(name): each for name, each in limits.items()}),
            default_limits=limits.get(DEFAULT_QUOTA, UNLIMITED),
            suspended=frozenset(TenantId(name) for name, each in tenants.items() if each.suspended),
            tenants=frozenset(map(TenantId, tenants)),
            preset=presets.get(CURRENT_PRESET),
            workloads=MappingProxyType({each.name: each.body for each in documents[Kind.WORKLOAD]}),
            policies=MappingProxyType(policies),
            pins=MappingProxyType(pins),
            instances=MappingProxyType(instances),
            routing=routing.get(ROUTING_NAME),
            whole=self._reader.whole,
        )


def _key(document: Document) -> tuple[bytes, KnownKey | None]:
    if is_revoked(document):  # its other fields have no effect, so it is no problem if they can't be read
        return b"", None
    return _known(read(KeyBody, document))


def _known(body: KeyBody) -> tuple[bytes, KnownKey | None]:
    """Return a key's digest, and the key unless it is revoked."""
    digest = bytes.fromhex(body.digest)
    if body.revoked_at_s is not None:
        return digest, None
    return digest, KnownKey(tenant=TenantId(body.tenant), expires_at_s=body.expires_at_s)


def _key_in_part(
    error: UnreadableDocumentError, before: tuple[bytes, KnownKey | None] | None
) -> tuple[bytes, KnownKey | None] | None:
    del before  # it may have been revoked or bound since
    body = read_in_part(KeyBody, error, instead={"expires_at_s": 0.0, "revoked_at_s": 0.0})
    return None if body is None else _known(body)


def _tenant_in_part(error: UnreadableDocumentError, before: TenantBody | None) -> TenantBody | None:
    del before  # it may have been suspended since
    return read_in_part(TenantBody, error, instead={"suspended": True})


def _instance_in_part(error: UnreadableDocumentError, before: InstanceBody | None) -> InstanceBody | None:
    return read_in_part(InstanceBody, error, before, instead={"draining": True})


class DirectoryKeeper:
    """Reads the directory again when the store has changed, here or in another gateway, and passes it to ``publish``.

    While the store can't be read, the last directory stays in force for ``trust_s``. Then ``expire`` is called, since
    a key may have been revoked meanwhile.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        store: Store,
        *,
        publish: Callable[[Directory], None],
        expire: Callable[[], None],
        trust_s: float,
        clock: SharedClock,
        problems: Problems,
    ) -> None:
        self._store = store
        self._reader = DirectoryReader(problems)
        self._publish = publish
        self._expire = expire
        self._trust_s = trust_s
        self._clock = clock
        self._problems = problems
        self._one = asyncio.Lock()
        self._trusted = self._published = False
        self._end: asyncio.TimerHandle | None = None
        self._known: Revision | None = None
        self._failure = ""
        self.current = Directory()

    async def refresh(self) -> None:
        """Bring the directory up to date, and compare the clocks; raises ``StoreUnavailableError``, and the known
        directory stays.

        An unexpected error is logged and counts as a store that can't be read: whatever failed, stored keys must not be
        trusted for longer than ``trust_s``.
        """
        async with self._one:  # an older reading never takes the place of a newer one
            try:
                await self._read()
            except StoreUnavailableError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                if reason != self._failure:
                    _log.exception("the documents of the store can't be applied")
                self._failure = reason
                if not self._trusted:
                    self._expire()  # a part of it may have been published
                raise StoreUnavailableError(f"its documents can't be applied ({reason:.500})") from error
            self._failure = ""

    async def _read(self) -> None:
        begun_s = asyncio.get_running_loop().time()
        stored = await self._store.read(_KINDS, self._clock.own, known=self._known)
        self._compare_clocks(stored.skew_s)
        if stored.documents is not None:
            self._published = False
            self.current = self._reader.read(stored.revision, stored.documents)
            self._known = stored.revision
        if not self._published or not self._trusted:
            self._publish(self.current)
            self._published = True
        self._confirmed(begun_s)

    async def run(self, interval_s: float) -> None:
        """Look again and again, for ever. Only cancelling ends the time of trust."""
        try:
            while True:
                await asyncio.sleep(interval_s)
                try:
                    await self.refresh()
                except StoreUnavailableError as error:
                    self._report_unavailable(error)
        except asyncio.CancelledError:
            if self._end is not None:
                self._end.cancel()
            raise

    def _confirmed(self, at_s: float) -> None:
        self._trusted = True
        self._problems.clear(ProblemKind.STORE, "store")
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_at(at_s + self._trust_s, self._distrust)

    def _distrust(self) -> None:
        self._trusted = False
        self._expire()

    def _report_unavailable(self, error: StoreUnavailableError) -> None:
        if self._trusted:
            means = f"stored keys are accepted as last read, for {self._trust_s:g} s after the last read"
        else:
            means = f"stored keys are refused with 503, since they could not be confirmed for {self._trust_s:g} s"
        self._problems.report(ProblemKind.STORE, "store", f"the store can't be read: {error}; {means}")

    def _compare_clocks(self, skew_s: float) -> None:
        self._clock.seen(skew_s)
        if abs(skew_s) <= MOST_SKEW_S:
            self._problems.clear(ProblemKind.CLOCK, "clock")
            return
        way = "ahead of" if skew_s > 0 else "behind"
        self._problems.report(
            ProblemKind.CLOCK,
            "clock",
            f"this machine's clock is about {abs(skew_s):.0f} s {way} the store's: set it right (NTP); what is stored "
            "goes by the store's clock",
        )
