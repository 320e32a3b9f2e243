"""Whether and when a request goes on: its model must be served, its tenant's quota must have room, and an instance too.

    with await admission.enter(ask) as entry:      quota reserved, turn come
        entry.instances ... entry.placed()   ...   planned and sent
        entry.settle(...)                          what it really cost
                                                   at the end of the block all that is left is given back

A request that finds room while nobody waits goes on at once. Otherwise it waits in its model's ``FairQueue``, until an
instance has room, its deadline, or its client's end; the latter two leave the queue in the same step. Nothing is ever
given to two requests: a turn that was given but not used yet counts as taken.

One that comes while breakers keep requests from all instances, and a trial of one of them is under way, waits there as
well: for its outcome, which lets it in, or sends it away with a 503.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, auto
from itertools import compress
from math import ceil
from typing import Protocol

from gateway.admission.entry import Ask, Entry
from gateway.admission.fair_queue import Claim, FairQueue, Waiting, claim_of, class_of
from gateway.admission.limiter import ConcurrencyLimiter, Rooms
from gateway.admission.quota import QuotaMeter
from gateway.admission.tenant_quotas import Held, TenantQuotas
from gateway.admission.urgent import Urgent
from gateway.errors import ContextLengthError, NoInstanceError, RateLimitedError
from gateway.errors.context_length import ContextLength
from gateway.limits import SloClass
from gateway.registry import Instance, LoadTracker, Registry
from gateway.registry.missing_model import missing_model
from gateway.types import Tenant
from kvcontrol.core.ids import InstanceId

_RETRY_AFTER_S = 2
_LONGEST_RETRY_S = 60
_TICK_S = 0.1
_RATE_MEMORY = 0.1
_ON_PROBATION = 1
_SHOWN = 8


class AdmissionMeter(Protocol):
    """Is told what became of requests before they were sent anywhere."""

    def waited(self, seconds: float) -> None: ...

    def shed(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """``bound`` is for each model; ``deadlines_s`` say how long a request of a class waits at most."""

    bound: int
    ageing_s: float
    deadlines_s: Mapping[SloClass, float]


class _Turn(Enum):
    """What becomes of a request that waits."""

    GIVEN = auto()
    PUSHED_OUT = auto()
    NOBODY_LEFT = auto()


class _Pool:
    """What waits for one model. ``given`` counts the places of requests that may go on and that no instance has been
    chosen for yet; ``hoping`` are those that came while all depended on the outcome of a trial.
    """

    def __init__(self, rules: QueueRules) -> None:
        self.queue = FairQueue(bound=rules.bound, ageing_s=rules.ageing_s)
        self.turns: dict[Waiting, asyncio.Future[_Turn]] = {}
        self.hoping: set[Waiting] = set()
        self.given = 0
        self.last_s = 0.0
        self.seconds_per_turn = 0.0

    def placed(self, places: int) -> None:
        """So many places that were given count at an instance now, or have ended."""
        self.given -= places

    def turn_given(self, now_s: float) -> None:
        gap_s = min(now_s - self.last_s, float(_LONGEST_RETRY_S)) if self.last_s else 0.0
        self.seconds_per_turn += _RATE_MEMORY * (gap_s - self.seconds_per_turn)
        self.last_s = now_s

    def retry_after_s(self) -> int:
        """How long the present line will take, as fast as it went lately."""
        return max(1, min(_LONGEST_RETRY_S, ceil(self.seconds_per_turn * len(self.queue))))


class AdmissionController:
    """Owns the queues. One for each process: fairness is among what came to this one."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        registry: Registry,
        load: LoadTracker,
        quotas: QuotaMeter,
        limiter: ConcurrencyLimiter,
        rules: QueueRules,
        meter: AdmissionMeter,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._available = registry.available
        self._load = load
        self._quota_meter = quotas
        self.quotas = TenantQuotas(quotas, meter)
        self._limiter = limiter
        self._rules = rules
        self._meter = meter
        self._clock = clock
        self._pools: dict[str, _Pool] = {}
        self._urgent = Urgent()

    @property
    def waiting(self) -> int:
        """How many requests wait, over all models."""
        return sum(len(pool.queue) for pool in self._pools.values())

    def admit(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that serve ``model`` now, full or not; none while all depends on the outcome of a trial.
        The model "" is that of a request that names none while nothing is served.

        Raises ``NoInstanceError`` when those that serve it are away, or may be, and ``NotFoundError`` for a model that
        does not exist (``Registry.may_serve``).
        """
        instances = self.usable(model)
        if instances or self._available.on_trial(model):
            return instances
        if not model or self._registry.models.may_serve(model):
            raise self._no_instance(model)
        raise missing_model(self._registry, model)

    def ready(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that serve ``model`` now, at least one; raises as ``admit``."""
        instances = self.admit(model)
        if not instances:
            raise self._no_instance(model)
        return instances

    def usable(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that serve ``model`` and are usable at this moment."""
        return self._available.usable(model)

    def untried(self, model: str, tried: AbstractSet[InstanceId]) -> tuple[Instance, ...]:
        """Return the instances that might take a request over that others have failed. One whose trial is under way is
        better than none: the request has waited already.
        """
        others = tuple(each for each in self.usable(model) if each.id not in tried)
        others = others or tuple(each for each in self._available.standing_in(model) if each.id not in tried)
        return others or tuple(
            each
            for each in self._available.serving(model)
            if each.id not in tried and self._available.on_probation(each.id)
        )

    async def enter(self, ask: Ask, held: Held | None = None) -> Entry:
        """Return when it is a request's turn; it is in until its entry is closed, which ``with`` does. ``held`` is what
        was taken of its tenant's quotas before it was read, where that was long work.

        Raises ``InvalidRequestError`` for one that no quota of its tenant could ever let in, ``RateLimitedError`` when
        a quota is used up or the gateway saturated, ``NoInstanceError`` when nobody serves the model now or the shared
        quotas can't be reached.
        """
        entry = Entry(ask, await self.quotas.reserve(ask, held), self._quota_meter, self._pump)
        try:
            usable = self.admit(ask.model)
            pool = self._pools.get(ask.model)
            if pool is None:
                pool = self._pools[ask.model] = _Pool(self._rules)
            rooms = self._rooms(usable)
            claim = claim_of(ask.tenant.limits.priority)
            free = [each[claim] for each in rooms]
            if not pool.queue and sum(free) > pool.given:
                self._pass(pool, ask)
            else:
                claim = await self._turn(pool, ask, hoping=not usable)
                usable = self.usable(ask.model)
                free = [each[claim] for each in self._rooms(usable)]
            entry.begin(pool.queue, _with_room(usable, free), pool, class_of(claim), self._urgent)
        except BaseException:
            entry.close()
            raise
        return entry

    def check_length(self, tenant: Tenant, model: str, *, least_tokens: int, output_tokens: int) -> None:
        """Raise ``ContextLengthError`` for a prompt of at least so many tokens that its tenant may not send, or that no
        instance which serves its model could take.
        """
        self.quotas.check_length(tenant.limits, prompt_tokens=least_tokens, output_tokens=output_tokens)
        serving = self._available.serving(model)
        known = [each.stats.context_length_tokens for each in serving if each.stats is not None]
        if known and len(known) == len(serving) and least_tokens >= max(known):
            raise ContextLengthError(
                f"the prompt has at least {least_tokens} tokens; instances for {model!r} take less than {max(known)}",
                ContextLength(prompt_tokens=least_tokens, maximum_tokens=max(known)),
            )

    async def count(self, ask: Ask) -> Entry:
        """Let a request in that needs no instance: its tenant's quotas hold, and there is no turn to wait for. Raises
        as ``enter`` does for them.
        """
        return Entry(ask, await self.quotas.reserve(ask), self._quota_meter)

    async def run(self) -> None:
        """Look again and again at what changed without a request ending: instances, their limits, ageing; for ever."""
        while True:
            self._limiter.watch(self._registry.all())
            for model in [model for model, pool in self._pools.items() if len(pool.queue)]:
                self._pump(model)
            for model in [each for each, pool in self._pools.items() if not pool.queue and not pool.given]:
                if not self._registry.models.knows(model):
                    del self._pools[model]
            await asyncio.sleep(_TICK_S)

    def answered(self, instance: Instance, *, after_s: float) -> None:
        """Note when an instance's answer began."""
        load = self._load
        self._limiter.answered(
            instance, after_s=after_s, in_flight=load.in_flight(instance.id), answering=load.answering(instance.id)
        )

    def overloaded(self, instance: Instance) -> None:
        """Note that an instance could not take a request."""
        self._limiter.overloaded(instance, answering=self._load.answering(instance.id))

    def limit(self, instance: Instance) -> int:
        """Return how many requests an instance may have now."""
        return self._limiter.limit(instance)

    def _pass(self, pool: _Pool, ask: Ask) -> None:
        """Let a request in that finds room while nobody waits."""
        pool.queue.let_in(ask.tenant.id, ask.tenant.limits.weight, ask.work)
        pool.given += ask.answers
        pool.turn_given(self._clock())
        self._meter.waited(0.0)

    async def _turn(self, pool: _Pool, ask: Ask, *, hoping: bool) -> Claim:
        """Return when it is this request's turn, and what it is let in as; what ``given`` counts is the caller's from
        then on. ``hoping``: there is nothing to wait for but the outcome of a trial.
        """
        tenant, now_s = ask.tenant, self._clock()
        waiting = Waiting(
            tenant=tenant.id,
            weight=tenant.limits.weight,
            priority=tenant.limits.priority,
            work=ask.work,
            places=ask.answers,
            arrived_s=now_s,
        )
        loser = pool.queue.push(waiting)
        if loser is waiting:
            raise self._saturated(pool, "queue_full", f"{len(pool.queue)} requests wait already")
        if loser is not None and not (lost := pool.turns.pop(loser)).done():
            lost.set_result(_Turn.PUSHED_OUT)
        turn = pool.turns[waiting] = asyncio.get_running_loop().create_future()
        self._pump(ask.model)  # those that wait may be of less claim, and have less room
        if hoping:
            pool.hoping.add(waiting)
        try:
            async with asyncio.timeout(self._rules.deadlines_s[tenant.limits.slo]):
                came = await turn
        except TimeoutError:
            self._leave(pool, waiting, ask.model)
            if not self.usable(ask.model):
                raise self._no_instance(ask.model) from None
            waited = f"no turn within {self._clock() - now_s:.0f} s"
            raise self._saturated(pool, "deadline", waited) from None
        except asyncio.CancelledError:
            self._leave(pool, waiting, ask.model)
            raise
        finally:
            pool.hoping.discard(waiting)
        if came is _Turn.NOBODY_LEFT:
            raise self._no_instance(ask.model)
        if came is _Turn.PUSHED_OUT:
            raise self._saturated(pool, "pushed_out", "requests of more claim came")
        self._meter.waited(self._clock() - now_s)
        return waiting.claim

    def _leave(self, pool: _Pool, waiting: Waiting, model: str) -> None:
        """Forget a request that no longer waits; pass its turn on when it had just been given one."""
        turn = pool.turns.pop(waiting, None)
        if turn is not None:
            pool.queue.remove(waiting)
        else:
            self._return(pool, waiting, model)

    def _return(self, pool: _Pool, waiting: Waiting, model: str) -> None:
        if waiting.granted:
            pool.given -= waiting.places
            pool.queue.correct(waiting.tenant, waiting.weight, -waiting.work)
            self._pump(model)

    def _pump(self, model: str) -> None:
        """Give turns while there is room."""
        pool = self._pools.get(model)
        if pool is None:
            return
        if pool.hoping:
            self._disappoint(model, pool)
        while pool.queue and any(has_room := self._has_room(model, pool)):
            now_s = self._clock()
            waiting = pool.queue.pop(now_s, has_room)
            if waiting is None:
                return
            turn = pool.turns.pop(waiting)
            if turn.done():  # its deadline or its client's end came first; it is about to leave
                pool.queue.correct(waiting.tenant, waiting.weight, -waiting.work)
                continue
            waiting.granted = True
            pool.given += waiting.places
            pool.turn_given(now_s)
            turn.set_result(_Turn.GIVEN)

    def _disappoint(self, model: str, pool: _Pool) -> None:
        """Send those away that hoped for a trial's outcome once it has failed."""
        if self._available.on_trial(model) or (self.usable(model) and not self._available.left_alone_s(model)):
            return
        for waiting in [each for each in pool.hoping if each in pool.turns]:
            turn = pool.turns.pop(waiting)
            pool.queue.remove(waiting)
            if not turn.done():
                turn.set_result(_Turn.NOBODY_LEFT)
        pool.hoping.clear()

    def _has_room(self, model: str, pool: _Pool) -> list[bool]:
        """Whether there is room for one more, by its claim."""
        rooms = self._rooms(self._available.usable(model))
        return [sum(of_claim) > pool.given for of_claim in zip(*rooms, strict=True)]

    def _rooms(self, instances: Sequence[Instance]) -> list[Rooms]:
        """How many more requests each instance may be given, by their claim; one, where that is its trial."""
        load, urgent, rooms_of = self._load, self._urgent, self._limiter.rooms
        if urgent:
            rooms = [rooms_of(each, load.in_flight(each.id), urgent.at(each.id)) for each in instances]
        else:
            rooms = [rooms_of(each, load.in_flight(each.id)) for each in instances]
        if self._available.troubled:
            rooms = [
                _on_probation(room) if self._available.on_probation(each.id) else room
                for each, room in zip(instances, rooms, strict=True)
            ]
        return rooms

    def _saturated(self, pool: _Pool, reason: str, why: str) -> RateLimitedError:
        self._meter.shed(reason)
        return RateLimitedError(
            f"the gateway is saturated: {why}", code="saturated", retry_after_s=pool.retry_after_s()
        )

    def _no_instance(self, model: str) -> NoInstanceError:
        self._meter.shed("no_instance")
        missing = ""
        if prefilling := [each.id for each in self._available.only_prefilling(model)]:
            missing = (
                f": {', '.join(prefilling[:_SHOWN])} can only prefill for others (LMDeploy's role), and no decode or "
                "hybrid instance is there to answer"
            )
        wanted = f" for model {model!r}" if model else ""
        return NoInstanceError(
            f"none of the {len(self._registry.all())} instances is usable{wanted} now{missing}",
            retry_after_s=max(_RETRY_AFTER_S, min(_LONGEST_RETRY_S, ceil(self._available.left_alone_s(model)))),
        )


def _with_room(usable: tuple[Instance, ...], rooms: list[int]) -> tuple[Instance, ...]:
    """Return the instances that have room, or all when none has: a turn that was given is kept."""
    return usable if all(rooms) else tuple(compress(usable, rooms)) or usable


def _on_probation(rooms: Rooms) -> Rooms:
    high, normal, low = (min(room, _ON_PROBATION) for room in rooms)
    return high, normal, low


__all__ = ["AdmissionController", "AdmissionMeter", "QueueRules"]
