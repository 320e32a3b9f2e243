"""The instances and their states; each part of it owns one kind of change.

- ``checks``: results of health checks, which make an instance healthy or unhealthy;
- ``breakers``: results of requests, which keep further requests from an instance;
- ``available``: which instances may take a request now;
- ``models``: which models are served.

The registry itself owns who is in it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import monotonic

from gateway.registry.availability import Availability
from gateway.registry.breaker import BreakerRules
from gateway.registry.breakers import Breakers
from gateway.registry.checks import CheckRules, Checks
from gateway.registry.instance import Instance, InstanceSpec, InstanceState
from gateway.registry.models import ServedModels
from gateway.registry.outliers import OutlierRules
from gateway.registry.roles import with_assigned_role
from gateway.registry.table import InstanceTable
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole

_log = logging.getLogger(__name__)


class Registry:
    """Readers get frozen snapshots; ``wait_until`` waits for a change."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        instances: Iterable[InstanceSpec] = (),
        *,
        rules: CheckRules,
        breaker: BreakerRules | None = None,
        outliers: OutlierRules | None = None,
        model_memory_s: float = 0.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._table = InstanceTable()
        self.breakers = Breakers(breaker or BreakerRules(), outliers or OutlierRules(), clock)
        self.models = ServedModels(self._table, memory_s=model_memory_s, clock=clock)
        self.checks = Checks(self._table, self.breakers, self.models, rules=rules, clock=clock)
        self.available = Availability(self._table, self.breakers)
        for each in instances:
            self._enter(each)

    def add(self, spec: InstanceSpec) -> Instance:
        """Take in a new instance, ``STARTING`` until its first good check; raises ``ValueError`` for an id or an
        address that is there already.
        """
        if spec.id in self._table:
            raise ValueError(f"instance id {spec.id!r} is taken")
        same = next((each for each in self._table.all() if each.endpoint == spec.endpoint), None)
        if same is not None:
            raise ValueError(f"{spec.url} is the address of instance {same.id!r}")
        self._enter(spec)
        self._table.wake()
        _log.info("instance %s joined (%s): %s", spec.id, spec.source, spec.url)
        return self._table[spec.id]

    def remove(self, instance: InstanceId) -> None:
        """Forget an instance; requests that it still works on go on. One that isn't known is no error."""
        gone = self._table.pop(instance)
        if gone is None:
            return
        self.models.absent.left(model.id for model in gone.models)
        self.breakers.leave(instance)
        self.checks.leave(instance)
        self._table.wake()
        _log.info("instance %s left", instance)

    def drain(self, instance: InstanceId, *, draining: bool = True) -> Instance:
        """Give an instance nothing new from now on, or (``draining`` False) again; raises ``KeyError``."""
        self._table.update(replace(self._table[instance], draining=draining))
        return self._table[instance]

    def assign(self, instance: InstanceId, role: EngineRole | None) -> Instance:
        """Note the role that an operator assigns to an instance, None for no role; raises ``KeyError``."""
        self._table.update(with_assigned_role(self._table[instance], role))
        return self._table[instance]

    def all(self) -> tuple[Instance, ...]:
        return self._table.all()

    def reporting(self) -> tuple[Instance, ...]:
        """Return the healthy instances that serve ``/kv/v1``: policies, pins and budgets are theirs to keep."""
        return tuple(each for each in self.all() if each.state is InstanceState.HEALTHY and each.stats is not None)

    def get(self, instance: InstanceId) -> Instance:
        """Return an instance's current snapshot; raises ``KeyError`` for an unknown id."""
        return self._table[instance]

    def knows(self, instance: InstanceId) -> bool:
        return instance in self._table

    def doubt(self, instance: InstanceId, reason: str) -> None:
        """Note that answers contradict what an instance announces of its blocks: they are to be learned anew."""
        before = self._table.find(instance)
        if before is not None and before.stats is not None:
            _log.warning("instance %s: %s", instance, reason)
            self._table.update(replace(before, doubts=before.doubts + 1))

    def settle(self, instance: InstanceId, problem: str | None = None) -> None:
        """Note that a healthy instance's blocks are known now, or why they aren't."""
        before = self._table.find(instance)
        if before is not None and before.state is InstanceState.HEALTHY:
            self._table.update(replace(before, settled=True, blocks_problem=problem))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as ``condition`` holds; it is evaluated again after every change."""
        await self._table.wait_until(condition)

    def _enter(self, spec: InstanceSpec) -> None:
        self._table.enter(spec)
        self.checks.enter(spec.id)
        self.breakers.enter(spec.id)
