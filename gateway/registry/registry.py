"""The instances and their states: the only object that changes them."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import monotonic
from typing import Any

from gateway.registry.breaker import BreakerRules, BreakerState
from gateway.registry.breakers import Breakers
from gateway.registry.instance import Instance, InstanceSpec, InstanceState, Isolation, ProbeResult
from gateway.registry.model_memory import ModelMemory
from gateway.registry.outliers import OutlierRules
from gateway.registry.panic import PATIENCE, Excuse, PanicRules
from gateway.registry.roles import role_after, told
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole

_log = logging.getLogger(__name__)

_SHARES = "its prefix cache knows no tenants"


class Registry:
    """Readers get frozen snapshots; ``changed`` wakes whoever waits for a difference. What is said of an instance that
    has been removed meanwhile is ignored.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        instances: Iterable[InstanceSpec] = (),
        *,
        unhealthy_after: int,
        breaker: BreakerRules | None = None,
        outliers: OutlierRules | None = None,
        isolation: Isolation = Isolation.ALLOW,
        panic: PanicRules | None = None,
        model_memory_s: float = 0.0,
        clock: Callable[[], float] = monotonic,
        first_check_s: float = 0.0,
    ) -> None:
        self._unhealthy_after = unhealthy_after
        self._isolation = isolation
        self._panic = panic or PanicRules()
        self.excused = Counter({Excuse.OWN_LAG: 0, Excuse.TOO_FEW: 0})
        self._several_tenants = False
        self._clock = clock
        self._breakers = Breakers(breaker or BreakerRules(), outliers or OutlierRules(), clock)
        self._absent_models = ModelMemory(model_memory_s, clock)
        self._first_check_s = first_check_s
        self.unchecked: set[InstanceId] = set()
        """Those that have not had a health check yet: nobody knows what they serve. For reading."""
        self._instances: dict[InstanceId, Instance] = {}
        self._prefilling: dict[InstanceId, None] = {}
        self._failures: dict[InstanceId, int] = {}
        self._not_only_late: set[InstanceId] = set()
        """One of their last failed checks in a row was no timeout."""
        self._seen_s: dict[InstanceId, float] = {}
        """When it was last seen how an instance is: an answer began, or a wait was in vain."""
        self._hung: dict[InstanceId, asyncio.Future[None]] = {}
        self._answering: dict[str | None, tuple[Instance, ...]] = {}
        """Those that serve a model and are well, worked out once for each change of an instance."""
        self._changed = asyncio.Condition()
        self._notifications: set[asyncio.Task[None]] = set()
        for each in instances:
            self._enter(each)

    def add(self, spec: InstanceSpec) -> Instance:
        """Take in a new instance, ``STARTING`` until its first good check; raises ``ValueError`` for an id or an
        address that is there already.
        """
        if spec.id in self._instances:
            raise ValueError(f"there is an instance {spec.id!r} already")
        same = next((each for each in self._instances.values() if each.place == spec.place), None)
        if same is not None:
            raise ValueError(f"{spec.url} is instance {same.id!r} already")
        self._enter(spec)
        self._wake()
        _log.info("instance %s joined (%s): %s", spec.id, spec.source, spec.url)
        return self._instances[spec.id]

    def remove(self, instance: InstanceId) -> None:
        """Forget an instance; requests that it still works on go on. One that isn't known is no error."""
        gone = self._instances.pop(instance, None)
        if gone is None:
            return
        self._absent_models.left(model.id for model in gone.models)
        self._answering.clear()
        del self._failures[instance]
        self._breakers.leave(instance)
        self._prefilling.pop(instance, None)
        self._hung.pop(instance, None)
        self._seen_s.pop(instance, None)
        self._not_only_late.discard(instance)
        self.unchecked.discard(instance)
        self._wake()
        _log.info("instance %s left", instance)

    def drain(self, instance: InstanceId, *, draining: bool = True) -> Instance:
        """Give an instance nothing new from now on, or (``draining`` False) again; raises ``KeyError``."""
        self._set(replace(self._instances[instance], draining=draining))
        return self._instances[instance]

    def assign(self, instance: InstanceId, role: EngineRole | None) -> Instance:
        """Note what an operator says that an instance is for, None where nothing; raises ``KeyError``."""
        self._set(told(self._instances[instance], role))
        return self._instances[instance]

    def all(self) -> tuple[Instance, ...]:
        return tuple(self._instances.values())

    def get(self, instance: InstanceId) -> Instance:
        """Return an instance's current snapshot; raises ``KeyError`` for an unknown id."""
        return self._instances[instance]

    def knows(self, instance: InstanceId) -> bool:
        return instance in self._instances

    def usable(self, model: str | None = None) -> tuple[Instance, ...]:
        """Return the instances that may be asked for an answer (for ``model``) at this moment. While all that there are
        wait for the outcome of a trial, that is none.
        """
        return self._breakers.open_to_requests(self.serving(model)) or self.standing_in(model)

    def standing_in(self, model: str | None = None) -> tuple[Instance, ...]:
        """Return the instances that prefill for others, and may be asked for an answer where nobody else can."""
        if not self._prefilling:
            return ()
        return self._breakers.open_to_requests(self._well(model, lambda each: each.stands_in))

    def serving(self, model: str | None = None) -> tuple[Instance, ...]:
        """Return the instances that are well and answer (for ``model``), also those left alone just now; where there
        are none, those that could stand in.
        """
        answering = self._answering.get(model)
        if answering is None:
            answering = self._well(model, lambda each: each.role is not EngineRole.PREFILL) or self._well(
                model, lambda each: each.stands_in
            )
            if answering:  # names that nobody serves come from clients, in any number
                self._answering[model] = answering
        return answering

    def _well(self, model: str | None, fits: Callable[[Instance], bool]) -> tuple[Instance, ...]:
        return tuple(
            each
            for each in self._instances.values()
            if each.state is InstanceState.HEALTHY
            and not each.draining
            and fits(each)
            and (model is None or each.serves(model))
        )

    def only_prefilling(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that are well and serve ``model``, and can answer nothing."""
        return self._well(model, lambda each: not each.answers)

    def on_trial(self, model: str) -> bool:
        """Whether nobody may be asked now, and the trial of one that serves ``model`` is under way."""
        return self._breakers.on_trial(self.serving(model))

    def left_alone_s(self, model: str) -> float:
        """Return for how long breakers keep requests from all that serve ``model``: 0 when one is free of them."""
        return self._breakers.left_alone_s(self.serving(model))

    @property
    def troubled(self) -> bool:
        """Whether any instance's breaker is not closed."""
        return self._breakers.troubled

    def on_probation(self, instance: InstanceId) -> bool:
        """Whether an instance gets one request at a time now; one that isn't known does not."""
        return self._breakers.on_probation(instance)

    def prefilling(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that may be given a prompt for ``model`` to compute for others. O(such instances)."""
        if not self._prefilling:
            return ()
        those = [self._instances[each] for each in self._prefilling]
        return self._breakers.open_to_requests(
            [each for each in those if each.state is InstanceState.HEALTHY and not each.draining and each.serves(model)]
        )

    def knows_model(self, model: str) -> bool:
        """Whether an instance, in whatever state, lists this model."""
        return any(each.serves(model) for each in self._instances.values())

    def may_serve(self, model: str) -> bool:
        """Whether a model may be served shortly: an instance lists it, one that did has left not long ago, one has not
        listed its models yet, or there is no instance.
        """
        return (
            not self._instances
            or self._absent_models.remembers(model)
            or any(each.serves(model) or not each.listed for each in self._instances.values())
        )

    def model_cards(self) -> list[dict[str, Any]]:
        """Return one card for each model id of instances that are well and answer: the first one's, with fields that
        only others have.
        """
        cards: dict[str, dict[str, Any]] = {}
        for each in self._instances.values():
            if each.state is InstanceState.HEALTHY and not each.draining and each.answers:
                for model in each.models:
                    cards[model.id] = model.card | cards.get(model.id, {})
        return list(cards.values())

    def served_models(self) -> list[str]:
        """Return the names of the models that usable instances serve, each once."""
        return list({model.id: None for each in self.serving() for model in each.models})

    def probe_succeeded(self, instance: InstanceId, probe: ProbeResult) -> None:
        """Take in a good health check: the instance is healthy from now on."""
        before = self._instances.get(instance)
        if before is None:
            return
        self._checked(instance)
        self._failures[instance] = 0
        self._not_only_late.discard(instance)
        if probe.stats is None and self._several_tenants and self._isolation is Isolation.STRICT:
            self._keep_out(replace(before, models=probe.models or before.models))
            return
        if (hung := self._hung.get(instance)) is not None and hung.done():
            del self._hung[instance]
        if before.state is InstanceState.UNHEALTHY:
            self._breakers.returned(instance)
        came = before.state is not InstanceState.HEALTHY
        if came and probe.stats is None and self._several_tenants:
            self._warn_of_sharing(instance)
        life = before.life + came
        if probe.models and probe.models != before.models:
            self._absent_models.left({model.id for model in before.models} - {model.id for model in probe.models})
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
                kv=probe.kv,
                role=role_after(before, probe),
                foreign_requests=foreign,
                life=life,
            )
        )

    def tenants(self, *, several: bool) -> None:
        """Note whether there are several tenants now: then an instance whose prefix cache is one for all of them is
        said, or is not used any more from this moment on.
        """
        came, self._several_tenants = several and not self._several_tenants, several
        if not came:
            return  # with one left, the next good check brings an instance back
        for each in self.all():
            if each.state is InstanceState.HEALTHY and each.stats is None:
                if self._isolation is Isolation.STRICT:
                    self._keep_out(each)
                else:
                    self._warn_of_sharing(each.id)

    def hung(self, instance: InstanceId) -> asyncio.Future[None]:
        """Return what is done from the moment that failed checks take an instance out until a good one brings it back.

        Requests that wait for such an instance would wait in vain. One that only refuses connections is another matter:
        it may be finishing what it has, and a dead process's connections end by themselves. An instance that has left
        is not hung: nobody checks it any more.
        """
        future = self._hung.get(instance)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            if instance in self._instances:
                self._hung[instance] = future
        return future

    @property
    def now_s(self) -> float:
        """The time by which it counts."""
        return self._clock()

    def probe_failed(
        self, instance: InstanceId, reason: str, *, may_drain: bool = False, since_s: float | None = None
    ) -> None:
        """Take in a failed health check: enough in a row take a healthy instance out; a starting one goes on
        starting. ``may_drain``: it could not be connected to, so what it has already may still be answered.
        ``since_s`` is when somebody began to wait in vain. Where the instance has begun to answer a request since, it,
        or this process, is only slow; where another wait has been in vain since, this one says nothing new: a hundred
        connections that time out together are one bad moment, not a hundred.
        """
        before = self._instances.get(instance)
        self._checked(instance)
        if before is None or (since_s is not None and self._seen_s.get(instance, float("-inf")) > since_s):
            return
        if since_s is not None:
            self._seen_s[instance] = self._clock()
        else:
            self._not_only_late.add(instance)
        self._failures[instance] += 1
        state = before.state
        if state is InstanceState.HEALTHY and self._failures[instance] >= self._unhealthy_after:
            if self._keeps(before):
                self.excused[Excuse.TOO_FEW] += 1
                self._set(replace(before, reason=f"{reason}; it is kept in use, as too few others are well"))
                return
            state = InstanceState.UNHEALTHY
        if state is InstanceState.UNHEALTHY and not may_drain and not (hung := self.hung(instance)).done():
            hung.set_result(None)
        if state is not InstanceState.HEALTHY:
            self._set(_away(before, state, reason))

    def probe_excused(self, instance: InstanceId, reason: str) -> None:
        """Take in a health check that failed by this process' own lag: it says nothing of the instance."""
        self.excused[Excuse.OWN_LAG] += 1
        _log.info("instance %s: %s; that is not counted against it", instance, reason)

    def connection_failed(self, instance: InstanceId, reason: str) -> None:
        """Take an instance out at once that a request could not reach; the next good health check brings it back."""
        before = self._instances.get(instance)
        if before is not None and before.state is InstanceState.HEALTHY:
            self._failures[instance] = self._unhealthy_after
            self._not_only_late.add(instance)
            self._set(_away(before, InstanceState.UNHEALTHY, reason))

    def picked(self, instance: InstanceId) -> None:
        """Note that a request goes to an instance now: half open, it gets no other until that one has an answer."""
        self._breakers.picked(instance)

    def ended(self, instance: InstanceId) -> None:
        """Note that a request that was given to an instance has ended, whatever came of it."""
        self._breakers.ended(instance)

    def answered(self, instance: InstanceId) -> None:
        """Note that an instance has begun to answer a request well (a refusal of a bad request is that, too)."""
        if instance in self._instances:
            self._seen_s[instance] = self._clock()
            self._breakers.answered(instance)

    def answered_badly(self, instance: InstanceId, reason: str) -> None:
        """Note an error that may be the request's own fault (a 500): it counts only against better peers."""
        if instance in self._instances:
            self._seen_s[instance] = self._clock()
            self._breakers.answered_badly(instance, reason)

    def failed(self, instance: InstanceId, reason: str) -> None:
        """Note that an instance failed a request: no answer, a cut one, a 502 to 504."""
        if instance in self._instances:
            self._breakers.failed(instance, reason)

    def breaker(self, instance: InstanceId) -> BreakerState:
        """Return the state of an instance's breaker; raises ``KeyError``."""
        return self._breakers.state(instance)

    def breaker_reason(self, instance: InstanceId) -> str:
        """Return why a breaker is not closed; empty when it is. Raises ``KeyError``."""
        return self._breakers.reason(instance)

    def doubt(self, instance: InstanceId, reason: str) -> None:
        """Note that answers contradict what an instance announces of its blocks: they are to be learned anew."""
        before = self._instances.get(instance)
        if before is not None and before.stats is not None:
            _log.warning("instance %s: %s", instance, reason)
            self._set(replace(before, doubts=before.doubts + 1))

    def settle(self, instance: InstanceId, problem: str | None = None) -> None:
        """Note that a healthy instance's blocks are known now, or why they aren't."""
        before = self._instances.get(instance)
        if before is not None and before.state is InstanceState.HEALTHY:
            self._set(replace(before, settled=True, blocks_problem=problem))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as ``condition`` holds; it is asked again after every change."""
        async with self._changed:
            await self._changed.wait_for(condition)

    def _enter(self, spec: InstanceSpec) -> None:
        self.unchecked.add(spec.id)
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
        self._failures[spec.id] = 0
        self._breakers.enter(spec.id)

    def _keeps(self, instance: Instance) -> bool:
        """Whether an instance that is due to be taken out is only late, and one of too few."""
        return (
            instance.id not in self._not_only_late
            and self._failures[instance.id] < PATIENCE * self._unhealthy_after
            and self._panic.keeps(instance, self._instances.values())
        )

    def _keep_out(self, instance: Instance) -> None:
        reason = f"{_SHARES}, there are several, and isolation is strict"
        self._set(_away(instance, InstanceState.UNHEALTHY, reason))

    def _warn_of_sharing(self, instance: InstanceId) -> None:
        _log.warning(
            "instance %s: %s, so the times of answers tell one what another has asked; isolation=strict would not use "
            "it",
            instance,
            _SHARES,
        )

    def _set(self, after: Instance) -> None:
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
        self._wake()

    def _checked(self, instance: InstanceId) -> None:
        """Note that an instance has had its first health check, whatever came of it, or is gone."""
        if instance in self.unchecked:
            self.unchecked.discard(instance)
            self._wake()

    async def until_checked(self, model: str | None = None) -> None:
        """Return when an instance serves ``model`` (any, for None), or each has had its first health check; after
        ``first_check_s`` in any case.
        """
        await self._until(lambda: not self.unchecked or bool(self.serving(model)))

    async def until_all_checked(self) -> None:
        """Return when each instance has had its first health check; after ``first_check_s`` in any case."""
        await self._until(lambda: not self.unchecked)

    async def _until(self, condition: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._first_check_s), self._changed:
                await self._changed.wait_for(condition)

    def _wake(self) -> None:
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
