"""The table of instances: frozen snapshots by id, and derived views, cached until an instance changes."""

import asyncio
import logging
from collections.abc import Callable

from gateway.registry.instance import Instance, InstanceSpec, InstanceState
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole

_log = logging.getLogger(__name__)


class InstanceTable:
    """Owned by the registry; its parts read it and replace snapshots in it. Every change wakes what waits for one."""

    def __init__(self) -> None:
        self._instances: dict[InstanceId, Instance] = {}
        self._prefilling: dict[InstanceId, None] = {}
        self._answering: dict[str | None, tuple[Instance, ...]] = {}
        """Healthy instances that answer for a model, worked out once for each change of an instance."""
        self._changed = asyncio.Condition()
        self._notifications: set[asyncio.Task[None]] = set()

    def __contains__(self, instance: InstanceId) -> bool:
        return instance in self._instances

    def __getitem__(self, instance: InstanceId) -> Instance:
        return self._instances[instance]

    def find(self, instance: InstanceId) -> Instance | None:
        return self._instances.get(instance)

    def all(self) -> tuple[Instance, ...]:
        return tuple(self._instances.values())

    def enter(self, spec: InstanceSpec) -> None:
        """Add an instance that was not checked yet; wakes nobody."""
        self._instances[spec.id] = Instance(
            id=spec.id,
            url=spec.url,
            source=spec.source,
            state=InstanceState.STARTING,
            reason="not checked yet",
            named_role=spec.role,
            role=spec.role or EngineRole.HYBRID,
        )
        if spec.role is EngineRole.PREFILL:
            self._prefilling[spec.id] = None
        self._answering.clear()

    def pop(self, instance: InstanceId) -> Instance | None:
        """Forget an instance; return its last snapshot, None for one that isn't there. Wakes nobody."""
        self._answering.clear()
        self._prefilling.pop(instance, None)
        return self._instances.pop(instance, None)

    def update(self, after: Instance) -> None:
        """Replace an instance's snapshot, and log a new state, role or drain; an equal one changes nothing."""
        before = self._instances[after.id]
        if after == before:
            return
        self._instances[after.id] = after
        self._answering.clear()
        if after.role is not before.role:
            _log.info("instance %s is a %s instance now", after.id, after.role)
            self._prefilling.pop(after.id, None)
            if after.role is EngineRole.PREFILL:
                self._prefilling[after.id] = None
        if after.state is not before.state:
            level = logging.WARNING if after.state is InstanceState.UNHEALTHY else logging.INFO
            _log.log(level, "instance %s is %s: %s", after.id, after.state, after.reason)
        if after.draining is not before.draining:
            _log.info("instance %s %s", after.id, "is draining" if after.draining else "takes requests again")
        self.wake()

    def answering(self, model: str | None) -> tuple[Instance, ...]:
        """Return the healthy instances that answer for ``model``; where there are none, those that could stand in."""
        answering = self._answering.get(model)
        if answering is None:
            answering = self.healthy(model, lambda each: each.role is not EngineRole.PREFILL) or self.healthy(
                model, lambda each: each.stands_in
            )
            if answering:  # names that nobody serves come from clients, in any number
                self._answering[model] = answering
        return answering

    def healthy(self, model: str | None, fits: Callable[[Instance], bool]) -> tuple[Instance, ...]:
        """Return the instances that fit, are healthy, don't drain and serve ``model`` (any, for None)."""
        return tuple(
            each
            for each in self._instances.values()
            if each.state is InstanceState.HEALTHY
            and not each.draining
            and fits(each)
            and (model is None or each.serves(model))
        )

    @property
    def prefilling(self) -> list[Instance]:
        """The instances that prefill for others, in whatever state."""
        return [self._instances[each] for each in self._prefilling]

    @property
    def any_prefilling(self) -> bool:
        return bool(self._prefilling)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as ``condition`` holds; it is evaluated again after every change."""
        async with self._changed:
            await self._changed.wait_for(condition)

    def wake(self) -> None:
        """Have every ``wait_until`` evaluate its condition again."""
        task = asyncio.get_running_loop().create_task(self._notify())
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
