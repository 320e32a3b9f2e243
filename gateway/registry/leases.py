"""Instances that register themselves stay as long as they go on saying that they are there.

A registration is a lease: one that isn't renewed in time drains and is forgotten. Nothing is stored: after a restart of
the gateway they are back with their next renewal. An instance that comes back at another address replaces itself.

Several gateways tell each other through a ``LeaseBoard``. While it can't be read, no lease runs out here: renewals may
go to others. Afterwards each has all of its time again. What it couldn't be told is told later, with its age.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.registry.addresses import AddressError, AddressRules
from gateway.registry.instance import Instance, InstanceSpec, Source
from gateway.registry.lease_board import BoardUnavailableError, LeaseBoard, Posted
from gateway.registry.membership import Membership
from gateway.registry.registry import Registry
from kvcontrol.core.ids import InstanceId

_LOOK_EVERY_S = 0.25
_READ_EVERY_S = 1.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lease:
    until_s: float
    ttl_s: float


@dataclass(frozen=True, slots=True)
class _Word:
    """What an instance said here; an empty ``url`` is a goodbye."""

    url: str
    ttl_s: float
    renewed_s: float


class Leases:
    """Owns the members of ``Source.SELF``."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        membership: Membership,
        registry: Registry,
        board: LeaseBoard,
        rules: AddressRules,
        drain_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._membership = membership
        self._registry = registry
        self._board = board
        self._rules = rules
        self._drain_s = drain_s
        self._clock = clock
        self._leases: dict[InstanceId, _Lease] = {}
        self._blind = False
        self._refused: dict[InstanceId, str] = {}
        self._unposted: dict[InstanceId, _Word] = {}
        self._taking = asyncio.Lock()

    async def renew(self, instance: InstanceId, url: str, *, ttl_s: float) -> Instance:
        """Take an instance in, or keep it for another ``ttl_s``, here and in the other gateways.

        Raises ``ValueError`` when its id or address is somebody else's.
        """
        taken = await self._take(instance, Posted(url=url, ttl_s=ttl_s, left_s=ttl_s))
        await self._post(instance, url, ttl_s)
        return taken

    async def end(self, instance: InstanceId) -> None:
        """Let an instance go that says goodbye: it drains; one without a lease is no error."""
        lease = self._leases.get(instance)
        self._forget(instance)
        if lease is not None:
            await self._post(instance, "", lease.ttl_s)

    def left_s(self, instance: InstanceId) -> float | None:
        """Return for how long an instance's lease still holds, None when it has none."""
        lease = self._leases.get(instance)
        return None if lease is None else max(0.0, lease.until_s - self._clock())

    async def run(self) -> None:
        """Hear what others were told, and end leases that ran out, for ever."""
        read_s = self._clock() - _READ_EVERY_S
        while True:
            if self._clock() - read_s >= _READ_EVERY_S:
                await self._hear()
                read_s = self._clock()
            if not self._blind:
                now_s = self._clock()
                for instance in [each for each, lease in self._leases.items() if lease.until_s <= now_s]:
                    self._forget(instance)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _take(self, instance: InstanceId, posted: Posted) -> Instance:
        async with self._taking:  # of several that say different addresses at once, each replaces the one before
            return await self._take_alone(instance, posted)

    async def _take_alone(self, instance: InstanceId, posted: Posted) -> Instance:
        spec = InstanceSpec(id=instance, url=posted.url, source=Source.SELF)
        if self._registry.knows(instance):
            before = self._registry.get(instance)
            if before.source is not Source.SELF:
                raise ValueError(f"instance {instance!r} is named by {before.source}; it can't register itself")
            if before.endpoint != spec.endpoint:  # another life of it: the former one is dead or dying
                # It may be retired once more meanwhile: that ends the task, and must not end whoever waits for it.
                await asyncio.wait({self._membership.retire(instance, drain_s=0)})
                self._membership.add(spec)
            elif self._membership.leaving(instance):
                self._membership.resume(instance)
        else:
            self._membership.add(spec)
        self._leases[instance] = _Lease(self._clock() + posted.left_s, posted.ttl_s)
        return self._registry.get(instance)

    def _forget(self, instance: InstanceId) -> None:
        if self._leases.pop(instance, None) is not None and self._registry.knows(instance):
            self._membership.retire(instance, drain_s=self._drain_s)

    async def _post(self, instance: InstanceId, url: str, ttl_s: float) -> None:
        word = self._unposted[instance] = _Word(url, ttl_s, self._clock())
        try:
            await self._pass_on(instance, word)
        except BoardUnavailableError as error:
            _log.warning("other gateways learn of instance %s later: %s", instance, error)

    async def _pass_on(self, instance: InstanceId, word: _Word) -> None:
        """Raises ``BoardUnavailableError``, and then it is still to be told."""
        age_s = max(0.0, self._clock() - word.renewed_s)
        await self._board.post(instance, word.url, ttl_s=word.ttl_s, age_s=age_s)
        if self._unposted.get(instance) is word:
            del self._unposted[instance]

    async def _hear(self) -> None:
        try:
            for instance, word in list(self._unposted.items()):
                await self._pass_on(instance, word)
            posted = await self._board.read()
        except BoardUnavailableError as error:
            if not self._blind:
                _log.warning("leases of other gateways can't be read; none expires until then: %s", error)
            self._blind = True
            return
        if self._blind:
            self._blind = False
            now_s = self._clock()
            for lease in self._leases.values():
                lease.until_s = now_s + lease.ttl_s
        for instance, entry in posted.items():
            if entry.url:
                await self._heard(instance, entry)
            else:
                self._forget(instance)
        self._refused = {each: why for each, why in self._refused.items() if each in posted}

    async def _heard(self, instance: InstanceId, entry: Posted) -> None:
        held = self._leases.get(instance)
        if held is not None and self._registry.knows(instance) and self._registry.get(instance).url == entry.url:
            until_s = self._clock() + entry.left_s
            if until_s > held.until_s or entry.ttl_s != held.ttl_s:  # what was read may be older than what is held
                self._leases[instance] = _Lease(until_s, entry.ttl_s)
            return
        try:
            url = self._rules.origin(entry.url)  # written by other settings than these, maybe
            await self._take(instance, replace(entry, url=url))
        except (AddressError, ValueError) as error:
            if self._refused.get(instance) != (why := str(error)):
                self._refused[instance] = why
                _log.warning("instance %s, registered at another gateway, is not added: %s", instance, why)
