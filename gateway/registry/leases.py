"""Instances that register themselves stay as long as they go on saying that they are there.

A registration is a lease: one that isn't renewed in time drains and is forgotten. Nothing is stored: after a restart of
the gateway they are back with their next renewal. An instance that comes back at another address replaces itself.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from gateway.registry.instance import Instance, InstanceSpec, Source
from gateway.registry.membership import Membership
from gateway.registry.registry import Registry
from kvcontrol.core.ids import InstanceId

_LOOK_EVERY_S = 0.25


class Leases:
    """Owns the members of ``Source.SELF``."""

    def __init__(
        self, *, membership: Membership, registry: Registry, drain_s: float, clock: Callable[[], float]
    ) -> None:
        self._membership = membership
        self._registry = registry
        self._drain_s = drain_s
        self._clock = clock
        self._until_s: dict[InstanceId, float] = {}

    async def renew(self, spec: InstanceSpec, *, ttl_s: float) -> Instance:
        """Take an instance in, or keep it for another ``ttl_s``.

        Raises ``ValueError`` when its id or address is somebody else's.
        """
        spec = replace(spec, source=Source.SELF)
        if self._registry.knows(spec.id):
            before = self._registry.get(spec.id)
            if before.source is not Source.SELF:
                raise ValueError(f"instance {spec.id!r} is named by {before.source}; it can't register itself")
            if before.url != spec.url:  # another life of it: the former one is dead or dying
                await self._membership.retire(spec.id, drain_s=0)
                self._membership.add(spec)
            elif self._membership.leaving(spec.id):
                self._membership.resume(spec.id)
        else:
            self._membership.add(spec)
        self._until_s[spec.id] = self._clock() + ttl_s
        return self._registry.get(spec.id)

    def end(self, instance: InstanceId) -> None:
        """Let an instance go that says goodbye: it drains; one without a lease is no error."""
        if self._until_s.pop(instance, None) is not None and self._registry.knows(instance):
            self._membership.retire(instance, drain_s=self._drain_s)

    def left_s(self, instance: InstanceId) -> float | None:
        """Return for how long an instance's lease still holds, None when it has none."""
        until_s = self._until_s.get(instance)
        return None if until_s is None else max(0.0, until_s - self._clock())

    async def run(self) -> None:
        """End leases that ran out, for ever."""
        while True:
            now_s = self._clock()
            for instance in [each for each, until_s in self._until_s.items() if until_s <= now_s]:
                self.end(instance)
            await asyncio.sleep(_LOOK_EVERY_S)


__all__ = ["Leases"]
