"""From a chosen instance to a request's plan: is its prompt computed there, or elsewhere first, and what is called.

On the way of a request this costs a few microseconds: what a plan's calls are depends on little, and is known before
the first request comes; the graph itself is worked out when somebody looks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final, NamedTuple

from gateway.registry import Instance
from gateway.routing import NOTHING_HELD, Candidate, Field, Held
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole, KVTransport
from kvcontrol.scheduler_ir import (
    CachedRun,
    Device,
    ExecutionPlan,
    Handover,
    IRBuilder,
    IRGraph,
    IROptimizer,
    IRRequest,
    Leg,
    PassContext,
    PDSeparator,
    Placement,
    PlanId,
    PrefixCacheAwarePass,
    Side,
    Split,
    legs_of,
)

_MOST_SHAPES: Final = 4096
"""Pairs of instances whose calls are kept; they are put together again when there are more."""
_ANSWERS: Final = Device("answers")
_PREFILLS: Final = Device("prefills")
"""Of forms: whoever it will be."""
_NO_DOMAINS: Final[Mapping[KVTransport, str]] = {}


class RequestSize(NamedTuple):
    """What a plan says of its request: tokens of the prompt (counted or estimated, 0 where nothing is known) and of the
    answer. ``separable`` says whether its prompt may be computed elsewhere.
    """

    request_id: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 1
    separable: bool = False


class PrefillSide(NamedTuple):
    """An instance that could compute a prompt for others, with what it has to do and what it holds."""

    instance: Instance
    candidate: Candidate


class Separation:
    """Owns what is kept of plans; ``separator`` decides.

    What calls a plan comes down to depends on who of its instances holds some of the prompt and on how KV goes from one
    to the other, not on which instances they are: of each such form the graph is worked out once, at the start.
    """

    def __init__(self, separator: PDSeparator) -> None:
        self._separator = separator
        self._forms = _forms()
        self._legs: dict[tuple[InstanceId, InstanceId, KVTransport, bool, bool], tuple[Leg, ...]] = {}
        self._here: dict[tuple[InstanceId, bool], tuple[Placement, tuple[Leg, ...]]] = {}

    def split(
        self,
        size: RequestSize,
        instance: Instance,
        answer: Candidate,
        prefills: Sequence[Instance],
        field: Field | None,
    ) -> Split:
        """Say where the prompt is computed; ``field`` are the candidates that ``prefills`` are, None for no instance.
        O(prefill instances).
        """
        return self._separator.split(
            size.prompt_tokens if size.separable and size.prompt_tokens else None,
            _side(instance, answer[1:4], answer.in_flight, answer.prefill_tokens),
            [] if field is None else _sides(prefills, field),
        )

    def hybrid(self, plan_id: str, size: RequestSize, answer: Candidate) -> ExecutionPlan:
        """Return the plan of a request that one instance serves whole."""
        shape = (answer.instance, answer.matched_tokens > 0)
        here = self._here.get(shape)
        if here is None:
            device = Device(answer.instance)
            legs = _moved(self._forms[None, shape[1], False], device, device)
            here = self._here[shape] = (Placement(answer=device), legs)
        placement, legs = here
        graph = partial(_graph, size, placement, answer, None)
        return ExecutionPlan(PlanId(plan_id), (size.request_id,), answer.instance, legs, graph)

    def plan(
        self, plan_id: str, size: RequestSize, placement: Placement, answer: Candidate, prefill: Candidate
    ) -> ExecutionPlan:
        """Return the plan of a request whose prompt ``prefill`` computes for ``answer``, another instance."""
        handover = placement.handover
        assert handover is not None  # noqa: S101 - or nobody would be told to compute it
        shape = (
            answer.instance,
            prefill.instance,
            handover.transport,
            answer.matched_tokens > 0,
            prefill.matched_tokens > 0,
        )
        legs = self._legs.get(shape)
        if legs is None:
            if len(self._legs) >= _MOST_SHAPES:
                self._legs.clear()
            legs = self._legs[shape] = _moved(self._forms[shape[2:]], placement.answer, handover.prefill)
        graph = partial(_graph, size, placement, answer, prefill)
        return ExecutionPlan(PlanId(plan_id), (size.request_id,), answer.instance, legs, graph)

    def forget(self, instance: InstanceId) -> None:
        """An instance is gone."""
        self._here.pop((instance, False), None)
        self._here.pop((instance, True), None)
        for shape in [each for each in self._legs if instance in each[:2]]:
            del self._legs[shape]


def _forms() -> dict[tuple[KVTransport | None, bool, bool], tuple[Leg, ...]]:
    """The legs of every plan that there can be, of instances that stand for any: by the transport (None: all is done
    where it is answered), and by whether who answers, and who computes the prompt, hold some of it.
    """
    size = RequestSize(prompt_tokens=2)

    def held(device: Device, holds: bool) -> Candidate:  # noqa: FBT001 - of two
        tokens = int(holds)
        return Candidate(
            instance=InstanceId(device), matched_tokens=tokens, tokens_by_tier={CacheTier.HBM: tokens} if tokens else {}
        )

    forms: dict[tuple[KVTransport | None, bool, bool], tuple[Leg, ...]] = {}
    for answers in (False, True):
        answer = held(_ANSWERS, answers)
        forms[None, answers, False] = legs_of(_graph(size, Placement(answer=_ANSWERS), answer, None))
        for transport, prefills in product(KVTransport, (False, True)):
            placement = Placement(answer=_ANSWERS, handover=Handover(prefill=_PREFILLS, transport=transport))
            forms[transport, answers, prefills] = legs_of(_graph(size, placement, answer, held(_PREFILLS, prefills)))
    return forms


def _moved(legs: tuple[Leg, ...], answer: Device, prefill: Device) -> tuple[Leg, ...]:
    """The legs of a form, with the instances that they are of."""
    at: dict[Device | None, Device] = {_ANSWERS: answer, _PREFILLS: prefill}
    return tuple([replace(leg, device=at[leg.device], target=at.get(leg.target)) for leg in legs])


def _graph(size: RequestSize, placement: Placement, answer: Candidate, prefill: Candidate | None) -> IRGraph:
    """The graph of one request, with what is cached of it loaded."""
    prompt_tokens = max(
        1, size.prompt_tokens, answer.matched_tokens + 1, 0 if prefill is None else prefill.matched_tokens + 1
    )
    request = IRRequest(
        request_id=size.request_id or "request",
        prompt_tokens=prompt_tokens,
        max_tokens=max(1, size.max_tokens),
        placement=placement,
        cached=(*_runs(answer), *(() if prefill is None else _runs(prefill))),
    )
    return IRBuilder().build([request]).optimize(IROptimizer([PrefixCacheAwarePass()], PassContext.of([request])))


def _runs(candidate: Candidate) -> tuple[CachedRun, ...]:
    """What an instance holds, fastest tier first: it is known how much lies in which tier, not where in the prompt."""
    runs: list[CachedRun] = []
    end = 0
    for tier in CacheTier:
        tokens = candidate.tokens_by_tier.get(tier, 0)
        if tokens:
            end += tokens
            runs.append(CachedRun(device=Device(candidate.instance), tier=tier, end=end))
    return tuple(runs)


def _sides(instances: Sequence[Instance], field: Field) -> list[Side]:
    """From the columns: of those that aren't chosen no candidate is made."""
    lineup, held = field.lineup, field.held
    return [
        _side(each, held.get(at, NOTHING_HELD), runs - each.foreign_requests, queued)
        for at, (each, runs, queued) in enumerate(zip(instances, lineup.running, lineup.queued, strict=True))
    ]


def _side(instance: Instance, held: Held, requests: int, computing_tokens: int) -> Side:
    """What was sent to an instance lately is no guess at what it holds where it has no prefix cache: in LMDeploy's own
    roles, and not where those are the gateway's alone and prompts go through the tiers.
    """
    domains = _NO_DOMAINS if instance.stats is None else instance.stats.transports
    keeps = instance.role is EngineRole.HYBRID or KVTransport.TIERS in domains
    return Side(Device(instance.id), held[2] if keeps else held[0], requests, computing_tokens, domains)


__all__ = ["PrefillSide", "RequestSize", "Separation"]
