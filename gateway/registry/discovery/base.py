"""The interface of discovery: a source yields sets of instances, and a failure changes nothing.

A place that can't be read says nothing about the instances it named: they stay, as long as their health checks pass.
One that suddenly names fewer than half of them is more likely broken than right: they stay until that was so for a
while.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

from gateway.problems import ProblemKind, Problems
from gateway.registry.addresses import AddressError, AddressRules
from gateway.registry.instance import InstanceSpec, Source
from gateway.registry.membership import Membership
from kvcontrol.core.ids import InstanceId

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_ID_CHARS = 64

_log = logging.getLogger(__name__)


class DiscoveryError(Exception):
    """The place could not be read; the message names it and the cause."""


class Watcher(Protocol):
    """One place where instances are named."""

    source: ClassVar[Source]

    @property
    def place(self) -> str:
        """What is watched, for people."""
        ...

    def watch(self) -> AsyncGenerator[Sequence[InstanceSpec], None]:
        """Yield all instances that are named there now, and again after every change, for ever.

        Raises ``DiscoveryError`` when the place can't be read; it is asked for again after a pause.
        """
        ...


class DiscoveryLoop:
    """Keeps the members of one source what its watcher says. At most one loop for each source."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        watcher: Watcher,
        *,
        membership: Membership,
        rules: AddressRules,
        drain_s: float,
        loss_s: float,
        problems: Problems,
    ) -> None:
        """``loss_s`` is how long more than half of the instances must be gone from there to be drained."""
        self._loss_s = loss_s
        self._problems = problems
        self._members: dict[InstanceId, InstanceSpec] = {}
        self._named: Sequence[InstanceSpec] = ()
        self._believed: asyncio.TimerHandle | None = None
        self._watcher = watcher
        self._membership = membership
        self._rules = rules
        self._drain_s = drain_s

    async def run(self) -> None:
        """Follow the watcher, for ever."""
        try:
            await self._follow()
        finally:
            self._trust()

    async def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                named = self._watcher.watch()
                try:
                    async for specs in named:
                        pause_s = _FIRST_PAUSE_S
                        self._take(specs)
                finally:
                    await named.aclose()
            except DiscoveryError as error:
                self._trust()
                self._problems.report(
                    ProblemKind.DISCOVERY, self._watcher.place, f"{error}; the instances named there before stay"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _take(self, specs: Sequence[InstanceSpec]) -> None:
        allowed = []
        for spec in specs:
            try:
                url = self._rules.origin(spec.url)
            except AddressError as error:
                _log.warning("instance %s, named by %s, is not added: %s", spec.id, self._watcher.place, error)
            else:
                allowed.append(replace(spec, url=url))
        self._named = allowed
        lost = self._lost(allowed)
        if 2 * len(lost) <= len(self._members):
            self._believe()
            return
        self._problems.report(
            ProblemKind.DISCOVERY,
            self._watcher.place,
            f"{self._watcher.place} no longer names {len(lost)} of {len(self._members)} instances "
            f"({', '.join(sorted(each.id for each in lost))}); they are drained after {self._loss_s:g} s of that",
        )
        if self._believed is None:
            self._believed = asyncio.get_running_loop().call_later(self._loss_s, self._believe)
        self._become([*allowed, *lost])

    def _lost(self, named: Sequence[InstanceSpec]) -> list[InstanceSpec]:
        ids, endpoints = {each.id for each in named}, {each.endpoint for each in named}
        return [each for name, each in self._members.items() if name not in ids and each.endpoint not in endpoints]

    def _believe(self) -> None:
        """Make the members those that the place names."""
        self._trust()
        self._problems.clear(ProblemKind.DISCOVERY, self._watcher.place)
        self._become(self._named)

    def _trust(self) -> None:
        """Wait no longer for a loss to last."""
        if self._believed is not None:
            self._believed.cancel()
            self._believed = None

    def _become(self, specs: Sequence[InstanceSpec]) -> None:
        self._members = {each.id: each for each in specs}
        self._membership.reconcile(self._watcher.source, specs, drain_s=self._drain_s)


def instance_name(*parts: object) -> str:
    """Return an instance id out of what a place calls it."""
    name = _UNFIT.sub("-", "-".join(str(part) for part in parts)).strip("-._")
    return name[-_MAX_ID_CHARS:].lstrip("-._")


__all__ = ["DiscoveryError", "DiscoveryLoop", "Watcher", "instance_name"]
