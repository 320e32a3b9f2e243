"""The instances and their states: the only object that changes them."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from gateway.registry.instance import Instance, InstanceState, ProbeResult
from gateway.settings import InstanceSettings
from kvcontrol.core.ids import InstanceId

_log = logging.getLogger(__name__)


class Registry:
    """A fixed set of instances. Readers get frozen snapshots; ``changed`` wakes whoever waits for a difference."""

    def __init__(self, instances: Iterable[InstanceSettings], *, unhealthy_after: int) -> None:
        self._unhealthy_after = unhealthy_after
        self._instances = {
            InstanceId(each.id): Instance(
                id=InstanceId(each.id), url=each.url, state=InstanceState.STARTING, reason="not checked yet"
            )
            for each in instances
        }
        self._failures = dict.fromkeys(self._instances, 0)
        self._hung: dict[InstanceId, asyncio.Future[None]] = {}
        self._changed = asyncio.Condition()
        self._notifications: set[asyncio.Task[None]] = set()

    def all(self) -> tuple[Instance, ...]:
        return tuple(self._instances.values())

    def get(self, instance: InstanceId) -> Instance:
        """Return an instance's current snapshot; raises ``KeyError`` for an unknown id."""
        return self._instances[instance]

    def usable(self) -> tuple[Instance, ...]:
        return tuple(each for each in self._instances.values() if each.state is InstanceState.HEALTHY)

    def knows_model(self, model: str) -> bool:
        """Whether an instance, in whatever state, has ever listed this model."""
        return any(each.serves(model) for each in self._instances.values())

    def model_cards(self) -> list[dict[str, Any]]:
        """Return one card for each model id of usable instances: the first one's, with fields that only others have."""
        cards: dict[str, dict[str, Any]] = {}
        for each in self.usable():
            for model in each.models:
                cards[model.id] = model.card | cards.get(model.id, {})
        return list(cards.values())

    def probe_succeeded(self, instance: InstanceId, probe: ProbeResult) -> None:
        """Take in a good health check: the instance is healthy from now on."""
        before = self._instances[instance]
        self._failures[instance] = 0
        if (hung := self._hung.get(instance)) is not None and hung.done():
            del self._hung[instance]
        foreign = 0
        if probe.stats is not None:
            foreign = max(0, probe.stats.load.running + probe.stats.load.waiting - probe.in_flight)
        self._set(
            replace(
                before,
                state=InstanceState.HEALTHY,
                reason=probe.stats_problem or "health check passed",
                models=probe.models or before.models,
                stats=probe.stats,
                foreign_requests=foreign,
            )
        )

    def hung(self, instance: InstanceId) -> asyncio.Future[None]:
        """Return what is done from the moment that failed checks take an instance out until a good one brings it back.

        Requests that wait for such an instance would wait in vain. One that only refuses connections is another matter:
        it may be finishing what it has, and a dead process's connections end by themselves.
        """
        future = self._hung.get(instance)
        if future is None:
            future = self._hung[instance] = asyncio.get_running_loop().create_future()
        return future

    def probe_failed(self, instance: InstanceId, reason: str, *, may_drain: bool = False) -> None:
        """Take in a failed health check: enough in a row take a healthy instance out; a starting one goes on
        starting. ``may_drain``: it could not be connected to, so what it has already may still be answered.
        """
        self._failures[instance] += 1
        before = self._instances[instance]
        state = before.state
        if state is InstanceState.HEALTHY and self._failures[instance] >= self._unhealthy_after:
            state = InstanceState.UNHEALTHY
        if state is InstanceState.UNHEALTHY and not may_drain and not (hung := self.hung(instance)).done():
            hung.set_result(None)
        if state is not InstanceState.HEALTHY:
            self._set(_away(before, state, reason))

    def connection_failed(self, instance: InstanceId, reason: str) -> None:
        """Take an instance out at once that a request could not reach; the next good health check brings it back."""
        before = self._instances[instance]
        if before.state is InstanceState.HEALTHY:
            self._failures[instance] = self._unhealthy_after
            self._set(_away(before, InstanceState.UNHEALTHY, reason))

    def settle(self, instance: InstanceId, problem: str | None = None) -> None:
        """Note that a healthy instance's blocks are known now, or why they aren't."""
        before = self._instances[instance]
        if before.state is InstanceState.HEALTHY:
            self._set(replace(before, settled=True, blocks_problem=problem))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as ``condition`` holds; it is asked again after every change."""
        async with self._changed:
            await self._changed.wait_for(condition)

    def _set(self, after: Instance) -> None:
        before = self._instances[after.id]
        if after == before:
            return
        self._instances[after.id] = after
        if after.state is not before.state:
            level = logging.WARNING if after.state is InstanceState.UNHEALTHY else logging.INFO
            _log.log(level, "instance %s is %s: %s", after.id, after.state, after.reason)
        task = asyncio.get_running_loop().create_task(self._notify())
        self._notifications.add(task)
        task.add_done_callback(self._notifications.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _away(instance: Instance, state: InstanceState, reason: str) -> Instance:
    """The same instance without what is true of a healthy one only."""
    return replace(
        instance, state=state, reason=reason, stats=None, foreign_requests=0, settled=False, blocks_problem=None
    )


__all__ = ["Registry"]
