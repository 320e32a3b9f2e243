"""The interface of discovery: a source yields sets of instances, and a failure changes nothing.

A source that can't be read changes nothing: its instances stay, as long as their health checks pass.
One that suddenly loses more than half of them is more likely broken than right: they stay until that lasted for a
while, and only new instances join meanwhile.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

from gateway.problems import ProblemKind, Problems
from gateway.registry.addresses import AddressError, AddressRules
from gateway.registry.discovery.losses import Loss, LossWindow
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
        """``loss_s`` is the window of losses, and how long a loss of more than half must last to be accepted."""
        self._loss_s = loss_s
        self._losses = LossWindow(loss_s)
        self._problems = problems
        self._members: dict[InstanceId, InstanceSpec] = {}
        self._named: Sequence[InstanceSpec] = ()
        self._judging: asyncio.TimerHandle | None = None
        self._watcher = watcher
        self._membership = membership
        self._rules = rules
        self._drain_s = drain_s

    async def run(self) -> None:
        """Follow the watcher, for ever."""
        try:
            await self._follow()
        finally:
            self._stop_judging()

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
                self._stop_judging()
                self._losses.interrupt()
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
        self._judge()

    def _judge(self) -> None:
        """Make the members those that the place names, or add the new ones and judge again when a loss has lasted."""
        self._stop_judging()
        loop = asyncio.get_running_loop()
        loss = self._losses.judge(self._named, loop.time())
        if loss is None:
            self._problems.clear(ProblemKind.DISCOVERY, self._watcher.place)
            self._become(self._named)
            return
        self._judging = loop.call_at(loss.until, self._judge)
        self._problems.report(ProblemKind.DISCOVERY, self._watcher.place, self._message(loss))
        endpoints = {each.endpoint for each in self._members.values()}
        new = [each for each in self._named if each.id not in self._members and each.endpoint not in endpoints]
        self._become([*self._members.values(), *new])

    def _message(self, loss: Loss) -> str:
        lost = {each.id for each in loss.lost}
        names = ", ".join(sorted(lost))
        moved = ", ".join(sorted(lost & {each.id for each in self._named}))
        return (
            f"{self._watcher.place} no longer names {len(loss.lost)} of {loss.of} instances ({names})"
            + (f"; it names another URL for {moved}" if moved else "")
            + f"; the present instances stay until no further loss has occurred for {self._loss_s:g} s"
        )

    def _stop_judging(self) -> None:
        if self._judging is not None:
            self._judging.cancel()
            self._judging = None

    def _become(self, specs: Sequence[InstanceSpec]) -> None:
        self._members = {each.id: each for each in specs}
        self._membership.reconcile(self._watcher.source, specs, drain_s=self._drain_s)


def instance_name(*parts: object) -> str:
    """Return an instance id out of what a place calls it."""
    name = _UNFIT.sub("-", "-".join(str(part) for part in parts)).strip("-._")
    return name[-_MAX_ID_CHARS:].lstrip("-._")
