"""Membership of the fleet: instances join and leave while requests run, without a lost request.

An instance joins with its loops (health, events) and leaves in two steps: it *drains*, which gives it nothing new, and
is forgotten once nothing of ours is left there, or after ``drain_s``. What it still works on then goes on to its end.
Several sources name instances; each owns those that it named, and ``reconcile`` brings a source's part to what it names
now.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Protocol, Self

from gateway.registry.instance import Instance, InstanceSpec, Source
from gateway.registry.load import LoadTracker
from gateway.registry.registry import Registry
from gateway.supervisor import supervised
from kvcontrol.core.ids import InstanceId

Loops = Mapping[str, Callable[[], Awaitable[None]]]

_log = logging.getLogger(__name__)


class Witness(Protocol):
    """Is told who joined (or came back while it was leaving) and who has left."""

    def joined(self, instance: InstanceId) -> None: ...

    def left(self, instance: InstanceId) -> None: ...


class Membership:
    """A context manager: at its end all loops are cancelled and gone."""

    def __init__(
        self,
        *,
        registry: Registry,
        load: LoadTracker,
        loops_of: Callable[[InstanceId], Loops],
        on_failure: Callable[[str], None],
        witnesses: Iterable[Witness] = (),
    ) -> None:
        self._registry = registry
        self._load = load
        self._loops_of = loops_of
        self._on_failure = on_failure
        self._witnesses = tuple(witnesses)
        self._loops: dict[InstanceId, list[asyncio.Task[None]]] = {}
        self._leaving: dict[InstanceId, asyncio.Task[None]] = {}
        self._waiting: dict[InstanceId, InstanceSpec] = {}
        self._departures: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for each in self._registry.all():
            self._attend(each.id)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, error, traceback
        tasks = [*self._departures, *(task for tasks in self._loops.values() for task in tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def add(self, spec: InstanceSpec) -> Instance:
        """Take an instance in and begin to check it; raises ``ValueError`` when its id or address is there already.

        The same instance that was leaving stays.
        """
        if spec.id in self._leaving and self._registry.get(spec.id).endpoint == spec.endpoint:
            return self.resume(spec.id)
        added = self._registry.add(spec)
        self._attend(spec.id)
        return added

    def drain(self, instance: InstanceId) -> Instance:
        """Give an instance nothing new; it stays a member. Raises ``KeyError``."""
        return self._registry.drain(instance)

    def resume(self, instance: InstanceId) -> Instance:
        """Give a draining instance requests again, also one that was leaving; raises ``KeyError``.

        Witnesses are told that it joined, so that one of them may drain it again.
        """
        self._registry.drain(instance, draining=False)
        if (leaving := self._leaving.pop(instance, None)) is not None:
            leaving.cancel()
        for witness in self._witnesses:
            witness.joined(instance)
        return self._registry.get(instance)

    def retire(self, instance: InstanceId, *, drain_s: float) -> asyncio.Task[None]:
        """Drain an instance and forget it once it is idle, after ``drain_s`` at the latest; raises ``KeyError``.

        Returns at once; the task ends when the instance is gone. An earlier retirement is replaced.
        """
        self._registry.drain(instance)
        if (before := self._leaving.pop(instance, None)) is not None:
            before.cancel()
        task = asyncio.create_task(self._leave(instance, drain_s), name=f"leave:{instance}")
        self._leaving[instance] = task
        self._departures.add(task)
        task.add_done_callback(self._departures.discard)
        return task

    def leaving(self, instance: InstanceId) -> bool:
        return instance in self._leaving

    def reconcile(self, source: Source, specs: Iterable[InstanceSpec], *, drain_s: float) -> None:
        """Make the members named by ``source`` those in ``specs``. An id or address that another source named first is
        left to it, and said in the log; one that is held by an instance which is leaving is taken over from it then.
        """
        wanted = {each.id: each for each in specs}
        self._waiting = {name: spec for name, spec in self._waiting.items() if spec.source is not source}
        for each in self._registry.all():
            if each.source is not source:
                continue
            spec = wanted.get(each.id)
            if spec is None or spec.endpoint != each.endpoint:
                if each.id not in self._leaving:
                    self.retire(each.id, drain_s=drain_s)
            elif each.id in self._leaving:
                self.resume(each.id)
        for spec in wanted.values():
            self._take_in(spec)

    def _take_in(self, spec: InstanceSpec) -> None:
        for each in self._registry.all():
            if each.id == spec.id and each.endpoint == spec.endpoint and each.source is spec.source:
                return
            if each.id in self._leaving and (each.id == spec.id or each.endpoint == spec.endpoint):
                self._waiting[spec.id] = spec
                return
        try:
            self.add(spec)
        except ValueError as error:
            _log.warning("instance %s, named by %s, is not added: %s", spec.id, spec.source, error)

    def _attend(self, instance: InstanceId) -> None:
        for witness in self._witnesses:
            witness.joined(instance)
        self._loops[instance] = [
            asyncio.create_task(supervised(name, loop, on_failure=self._on_failure), name=name)
            for name, loop in self._loops_of(instance).items()
        ]

    async def _leave(self, instance: InstanceId, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await self._load.until_idle(instance)
        except TimeoutError:
            left = self._load.of(instance).in_flight
            _log.warning("instance %s leaves with %d requests running after %g s", instance, left, drain_s)
        del self._leaving[instance]  # from here on nothing waits: it is gone at once, or stays
        loops = self._loops.pop(instance)
        for loop in loops:
            loop.cancel()
        self._registry.remove(instance)
        self._load.forget(instance)
        for witness in self._witnesses:
            witness.left(instance)
        waiting, self._waiting = self._waiting, {}
        for spec in waiting.values():
            self._take_in(spec)
        await asyncio.gather(*loops, return_exceptions=True)
