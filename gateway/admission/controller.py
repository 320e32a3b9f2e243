"""Admission of requests: waits until the model is served, the tenant's quota allows it, and an instance has a slot.

    with await admission.admit(request) as slot:   quota reserved, admitted
        slot.instances ... slot.placed()     ...   planned and sent
        slot.settle(...)                           what the request really cost
                                                   at the end of the block all that is left is given back

A request that finds room while no other one waits is admitted at once. Otherwise it waits in its model's ``FairQueue``,
until an instance has room, its deadline, or its client's end; the latter two leave the queue in the same step. No slot
is ever given to two requests: one that was given but not used yet counts as taken.

A request that comes while breakers keep requests from all instances, and a trial of one of them is under way, waits as
well: for the trial's outcome, which admits the request, or ends it with a 503.
"""

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import compress
from math import ceil
from typing import Protocol

from gateway.admission.capacity import Capacity
from gateway.admission.fair_queue import Claim, claim_of, class_of
from gateway.admission.limiter import ConcurrencyLimiter
from gateway.admission.model_queue import LONGEST_RETRY_S, ModelQueue, WaitResult
from gateway.admission.quota import QuotaMeter
from gateway.admission.slot import AdmissionRequest, AdmissionSlot
from gateway.admission.tenant_quotas import Held, TenantQuotas
from gateway.errors import ContextLengthError, NoInstanceError, RateLimitedError
from gateway.errors.context_length import ContextLength
from gateway.limits import SloClass
from gateway.registry import Instance, LoadTracker, Registry
from gateway.registry.missing_model import missing_model
from gateway.types import Tenant
from kvcontrol.core.ids import InstanceId

_RETRY_AFTER_S = 2
_TICK_S = 0.1
_SHOWN = 8


class AdmissionMeter(Protocol):
    """Counts what became of requests before they were sent anywhere."""

    def waited(self, seconds: float) -> None: ...

    def shed(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """``bound`` is for each model; ``deadlines_s`` bound the wait of a request by its class."""

    bound: int
    ageing_s: float
    deadlines_s: Mapping[SloClass, float]


class AdmissionController:
    """Owns the queues. One for each process: fairness is among what came to this one. ``capacity`` is how many requests
    the instances may be given.
    """

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
        self._quota_meter = quotas
        self.quotas = TenantQuotas(quotas, meter)
        self.capacity = Capacity(limiter=limiter, load=load, available=registry.available)
        self._rules = rules
        self._meter = meter
        self._clock = clock
        self._queues: dict[str, ModelQueue] = {}

    @property
    def waiting(self) -> int:
        """How many requests wait, over all models."""
        return sum(len(each.queue) for each in self._queues.values())

    def candidates(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that serve ``model`` now, full or not; none while all depends on the outcome of a trial.
        The model "" is that of a request that names none while nothing is served.

        Raises ``NoInstanceError`` when those that serve it are away, or may be, and ``NotFoundError`` for a model that
        does not exist (``ServedModels.may_serve``).
        """
        instances = self.usable(model)
        if instances or self._available.on_trial(model):
            return instances
        if not model or self._registry.models.may_serve(model):
            raise self._no_instance(model)
        raise missing_model(self._registry, model)

    def ready(self, model: str) -> tuple[Instance, ...]:
        """Return the instances that serve ``model`` now, at least one; raises as ``candidates``."""
        instances = self.candidates(model)
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

    async def admit(self, request: AdmissionRequest, held: Held | None = None) -> AdmissionSlot:
        """Return a slot for a request as soon as there is one; the request has it until the slot is closed, which
        ``with`` does. ``held`` is what was taken of its tenant's quotas before it was read, where that was long work.

        Raises ``InvalidRequestError`` for a request that no quota of its tenant could ever admit, ``RateLimitedError``
        when a quota is used up or the gateway is saturated, ``NoInstanceError`` when no instance serves the model now
        or the shared quotas can't be reached.
        """
        reserved = await self.quotas.reserve(request, held)
        slot = AdmissionSlot(request, reserved, self._quota_meter, self._admit_waiting)
        try:
            usable = self.candidates(request.model)
            queue = self._queues.get(request.model)
            if queue is None:
                queue = self._queues[request.model] = ModelQueue(bound=self._rules.bound, ageing_s=self._rules.ageing_s)
            claim = claim_of(request.tenant.limits.priority)
            free = [each[claim] for each in self.capacity.free_places(usable)]
            if not queue.queue and sum(free) > queue.unplaced:
                queue.admit_at_once(request, self._clock())
                self._meter.waited(0.0)
            else:
                claim = await self._wait(queue, request, awaiting_trial=not usable)
                usable = self.usable(request.model)
                free = [each[claim] for each in self.capacity.free_places(usable)]
            slot.begin(queue.queue, _with_slot(usable, free), queue, class_of(claim), self.capacity.urgent)
        except BaseException:
            slot.close()
            raise
        return slot

    async def admit_without_instance(self, request: AdmissionRequest) -> AdmissionSlot:
        """Return a slot for a request that needs no instance: its tenant's quotas hold, and it never waits. Raises as
        ``admit`` does for quotas.
        """
        return AdmissionSlot(request, await self.quotas.reserve(request), self._quota_meter)

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

    async def run(self) -> None:
        """Look again and again at what changed without a request ending: instances, their limits, ageing; for ever."""
        while True:
            self.capacity.watch(self._registry.all())
            for model in [model for model, queue in self._queues.items() if len(queue.queue)]:
                self._admit_waiting(model)
            for model in [each for each, queue in self._queues.items() if not queue.queue and not queue.unplaced]:
                if not self._registry.models.knows(model):
                    del self._queues[model]
            await asyncio.sleep(_TICK_S)

    async def _wait(self, queue: ModelQueue, request: AdmissionRequest, *, awaiting_trial: bool) -> Claim:
        """Return when this request is admitted, and its claim then; what ``unplaced`` counts is the caller's from then
        on. ``awaiting_trial``: no instance is usable before the outcome of a trial.
        """
        model, began_s = request.model, self._clock()
        waiting = queue.push(request, began_s)
        if waiting is None:
            raise self._saturated(queue, "queue_full", f"the queue of its model is full ({len(queue.queue)} requests)")
        admitted = queue.waiters[waiting]
        self._admit_waiting(model)  # requests that wait may be of less claim, and have less room
        if awaiting_trial:
            queue.awaiting_trial.add(waiting)
        try:
            async with asyncio.timeout(self._rules.deadlines_s[request.tenant.limits.slo]):
                result = await admitted
        except TimeoutError:
            if queue.leave(waiting):
                self._admit_waiting(model)
            if not self.usable(model):
                raise self._no_instance(model) from None
            waited = f"no admission slot within {self._clock() - began_s:.0f} s"
            raise self._saturated(queue, "deadline", waited) from None
        except asyncio.CancelledError:
            if queue.leave(waiting):
                self._admit_waiting(model)
            raise
        finally:
            queue.awaiting_trial.discard(waiting)
        if result is WaitResult.NO_INSTANCE:
            raise self._no_instance(model)
        if result is WaitResult.PUSHED_OUT:
            raise self._saturated(queue, "pushed_out", "requests with a higher claim took its place in the queue")
        self._meter.waited(self._clock() - began_s)
        return waiting.claim

    def _admit_waiting(self, model: str) -> None:
        """Admit requests that wait while there is room."""
        queue = self._queues.get(model)
        if queue is None:
            return
        if queue.awaiting_trial and self._trial_failed(model):
            queue.end_waits_for_trial()
        while queue.queue:
            has_slot = self.capacity.has_slot(self._available.usable(model), unplaced=queue.unplaced)
            if not any(has_slot) or not queue.admit_next(self._clock(), has_slot):
                return

    def _trial_failed(self, model: str) -> bool:
        if self._available.on_trial(model):
            return False
        return not self.usable(model) or self._available.left_alone_s(model) > 0

    def _saturated(self, queue: ModelQueue, reason: str, why: str) -> RateLimitedError:
        self._meter.shed(reason)
        return RateLimitedError(
            f"the gateway is saturated: {why}", code="saturated", retry_after_s=queue.retry_after_s()
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
            retry_after_s=max(_RETRY_AFTER_S, min(LONGEST_RETRY_S, ceil(self._available.left_alone_s(model)))),
        )


def _with_slot(usable: tuple[Instance, ...], free: list[int]) -> tuple[Instance, ...]:
    """Return the instances that have room, or all when none has: a slot that was given is kept."""
    return usable if all(free) else tuple(compress(usable, free)) or usable
