"""Applies the results of health checks to instances and to requests that wait for them."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gateway.registry.breakers import Breakers
from gateway.registry.instance import Instance, InstanceState, Isolation, ProbeResult
from gateway.registry.models import ServedModels
from gateway.registry.panic import PATIENCE, Excuse, PanicRules
from gateway.registry.roles import role_after
from gateway.registry.table import InstanceTable
from kvcontrol.core.ids import InstanceId

_log = logging.getLogger(__name__)

_SHARES = "its prefix cache knows no tenants"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRules:
    """``unhealthy_after`` failed checks in a row take an instance out, ``panic`` says when not. ``isolation`` is for
    instances without ``/kv/v1``. ``first_check_s`` bounds the wait for first checks.
    """

    unhealthy_after: int
    isolation: Isolation = Isolation.ALLOW
    panic: PanicRules = field(default_factory=PanicRules)
    first_check_s: float = 0.0


class Checks:
    """Owns the counts of failed checks. Results for an instance that has been removed meanwhile are ignored."""

    def __init__(
        self,
        table: InstanceTable,
        breakers: Breakers,
        models: ServedModels,
        *,
        rules: CheckRules,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._breakers = breakers
        self._models = models
        self._rules = rules
        self._clock = clock
        self._several_tenants = False
        self.excused = Counter({Excuse.OWN_LAG: 0, Excuse.TOO_FEW: 0})
        self.unchecked: set[InstanceId] = set()
        """Instances without a health check so far: what they serve is unknown. For reading."""
        self._failures: dict[InstanceId, int] = {}
        self._not_only_late: set[InstanceId] = set()
        """Instances of whose last failed checks in a row one was no timeout."""
        self._hung: dict[InstanceId, asyncio.Future[None]] = {}

    def enter(self, instance: InstanceId) -> None:
        self.unchecked.add(instance)
        self._failures[instance] = 0

    def leave(self, instance: InstanceId) -> None:
        del self._failures[instance]
        self._hung.pop(instance, None)
        self._not_only_late.discard(instance)
        self.unchecked.discard(instance)

    @property
    def now_s(self) -> float:
        """The time of the clock that ``failed`` compares with."""
        return self._clock()

    def succeeded(self, instance: InstanceId, probe: ProbeResult) -> None:
        """Take in a good health check: the instance is healthy from now on."""
        before = self._table.find(instance)
        if before is None:
            return
        self._checked(instance)
        self._failures[instance] = 0
        self._not_only_late.discard(instance)
        if probe.stats is None and self._several_tenants and self._rules.isolation is Isolation.STRICT:
            self._keep_out(replace(before, models=probe.models or before.models))
            return
        if (hung := self._hung.get(instance)) is not None and hung.done():
            del self._hung[instance]
        if before.state is InstanceState.UNHEALTHY:
            self._breakers.returned(instance)
        came = before.state is not InstanceState.HEALTHY
        if came and probe.stats is None and self._several_tenants:
            _warn_of_sharing(instance)
        if probe.models and probe.models != before.models:
            self._models.absent.left({model.id for model in before.models} - {model.id for model in probe.models})
        foreign = 0
        if probe.stats is not None:
            foreign = max(0, probe.stats.load.running + probe.stats.load.waiting - probe.in_flight)
        self._table.update(
            replace(
                before,
                state=InstanceState.HEALTHY,
                reason=probe.stats_problem or "health check passed",
                models=probe.models or before.models,
                stats=probe.stats,
                kv=probe.kv,
                role=role_after(before, probe),
                foreign_requests=foreign,
                life=before.life + came,
            )
        )

    def failed(
        self, instance: InstanceId, reason: str, *, may_drain: bool = False, since_s: float | None = None
    ) -> None:
        """Take in a failed health check: enough in a row take a healthy instance out; a starting one goes on
        starting. ``may_drain``: it could not be connected to, so what it has already may still be answered.
        ``since_s`` is when a request began to wait in vain. Where the instance has begun to answer a request since, it,
        or this process, is only slow; where another wait has been in vain since, this one is no news: a hundred
        connections that time out together are one bad moment, not a hundred.
        """
        before = self._table.find(instance)
        self._checked(instance)
        if before is None or (since_s is not None and self._breakers.seen_s(instance) > since_s):
            return
        if since_s is not None:
            self._breakers.saw(instance)
        else:
            self._not_only_late.add(instance)
        self._failures[instance] += 1
        state = before.state
        if state is InstanceState.HEALTHY and self._failures[instance] >= self._rules.unhealthy_after:
            if self._keeps(before):
                self.excused[Excuse.TOO_FEW] += 1
                kept = f"{reason}; it is kept in use, as too few others are well"
                self._table.update(replace(before, reason=kept))
                return
            state = InstanceState.UNHEALTHY
        if state is InstanceState.UNHEALTHY and not may_drain and not (hung := self.hung(instance)).done():
            hung.set_result(None)
        if state is not InstanceState.HEALTHY:
            self._table.update(_away(before, state, reason))

    def excuse(self, instance: InstanceId, reason: str) -> None:
        """Take in a health check that failed by this process' own lag: it does not count against the instance."""
        self.excused[Excuse.OWN_LAG] += 1
        _log.info("instance %s: %s; that is not counted against it", instance, reason)

    def connection_failed(self, instance: InstanceId, reason: str) -> None:
        """Take an instance out at once that a request could not reach; the next good health check brings it back."""
        before = self._table.find(instance)
        if before is not None and before.state is InstanceState.HEALTHY:
            self._failures[instance] = self._rules.unhealthy_after
            self._not_only_late.add(instance)
            self._table.update(_away(before, InstanceState.UNHEALTHY, reason))

    def hung(self, instance: InstanceId) -> asyncio.Future[None]:
        """Return what is done from the moment that failed checks take an instance out until a good one brings it back.

        Requests that wait for such an instance would wait in vain. One that only refuses connections is another matter:
        it may be finishing what it has, and a dead process's connections end by themselves. An instance that has left
        is not hung: nobody checks it any more.
        """
        future = self._hung.get(instance)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            if instance in self._table:
                self._hung[instance] = future
        return future

    def tenants(self, *, several: bool) -> None:
        """Note whether there are several tenants now. From the moment that there are, an instance with one prefix cache
        for all of them is warned of, or out of use.
        """
        came, self._several_tenants = several and not self._several_tenants, several
        if not came:
            return  # with one left, the next good check brings an instance back
        for each in self._table.all():
            if each.state is InstanceState.HEALTHY and each.stats is None:
                if self._rules.isolation is Isolation.STRICT:
                    self._keep_out(each)
                else:
                    _warn_of_sharing(each.id)

    async def until_checked(self, model: str | None = None) -> None:
        """Return when an instance serves ``model`` (any, for None), or each has had its first health check; after
        ``first_check_s`` in any case.
        """
        await self._until(lambda: not self.unchecked or bool(self._table.answering(model)))

    async def until_all_checked(self) -> None:
        """Return when each instance has had its first health check; after ``first_check_s`` in any case."""
        await self._until(lambda: not self.unchecked)

    async def _until(self, condition: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rules.first_check_s):
                await self._table.wait_until(condition)

    def _checked(self, instance: InstanceId) -> None:
        """Note that an instance has had its first health check, whatever came of it, or is gone."""
        if instance in self.unchecked:
            self.unchecked.discard(instance)
            self._table.wake()

    def _keeps(self, instance: Instance) -> bool:
        """Whether an instance that is due to be taken out is only late, and one of too few."""
        return (
            instance.id not in self._not_only_late
            and self._failures[instance.id] < PATIENCE * self._rules.unhealthy_after
            and self._rules.panic.keeps(instance, self._table.all())
        )

    def _keep_out(self, instance: Instance) -> None:
        reason = f"{_SHARES}, there are several, and isolation is strict"
        self._table.update(_away(instance, InstanceState.UNHEALTHY, reason))


def _warn_of_sharing(instance: InstanceId) -> None:
    _log.warning(
        "instance %s: %s, so answer times reveal other tenants' prompts; isolation=strict would exclude it",
        instance,
        _SHARES,
    )


def _away(instance: Instance, state: InstanceState, reason: str) -> Instance:
    """The same instance without what is true of a healthy one only."""
    return replace(
        instance, state=state, reason=reason, stats=None, foreign_requests=0, settled=False, blocks_problem=None
    )
