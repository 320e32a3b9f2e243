"""From a chosen instance to a request's plan: is its prompt computed there, or elsewhere first, and what is called.

On the way of a request this costs a few microseconds: what a plan's calls are depends on its placement alone and is
kept; the graph itself is worked out when somebody looks.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from gateway.registry import Instance
from gateway.routing import Candidate
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole, KVTransport
from kvcontrol.scheduler_ir import (
    CachedRun,
    Device,
    ExecutionPlan,
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
"""Placements whose calls are kept; they are worked out again when there are more."""
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
    """Owns what is kept of plans; ``separator`` decides."""

    def __init__(self, separator: PDSeparator) -> None:
        self._separator = separator
        self._legs: dict[tuple[Placement, bool, bool], tuple[Leg, ...]] = {}
        self._here: dict[tuple[InstanceId, bool], tuple[Placement, tuple[Leg, ...]]] = {}

    def split(self, size: RequestSize, instance: Instance, answer: Candidate, prefills: Sequence[PrefillSide]) -> Split:
        """Say where the prompt is computed. O(prefill instances)."""
        return self._separator.split(
            size.prompt_tokens if size.separable and size.prompt_tokens else None,
            _side(instance, answer),
            [_side(each.instance, each.candidate) for each in prefills],
        )

    def hybrid(self, plan_id: str, size: RequestSize, answer: Candidate) -> ExecutionPlan:
        """Return the plan of a request that one instance serves whole."""
        shape = (answer.instance, bool(answer.matched_tokens))
        here = self._here.get(shape)
        if here is None:
            placement = Placement(answer=Device(answer.instance))
            here = self._here[shape] = (placement, self._legs_of(size, placement, answer, None))
        return _plan(plan_id, size, here[0], here[1], answer, None)

    def plan(
        self, plan_id: str, size: RequestSize, placement: Placement, answer: Candidate, prefill: Candidate | None
    ) -> ExecutionPlan:
        """Return the plan of a placement; ``prefill`` is who computes the prompt, None where that is who answers."""
        return _plan(plan_id, size, placement, self._legs_of(size, placement, answer, prefill), answer, prefill)

    def _legs_of(
        self, size: RequestSize, placement: Placement, answer: Candidate, prefill: Candidate | None
    ) -> tuple[Leg, ...]:
        shape = (placement, bool(answer.matched_tokens), prefill is not None and bool(prefill.matched_tokens))
        legs = self._legs.get(shape)
        if legs is None:
            if len(self._legs) >= _MOST_SHAPES:
                self._legs.clear()
            legs = self._legs[shape] = legs_of(_graph(size, placement, answer, prefill))
        return legs

    def forget(self, instance: InstanceId) -> None:
        """An instance is gone."""
        self._here.pop((instance, False), None)
        self._here.pop((instance, True), None)
        device = Device(instance)
        for shape in [each for each in self._legs if device in {each[0].answer, each[0].prefill}]:
            del self._legs[shape]


def _plan(  # noqa: PLR0913, PLR0917 - all that a plan is made of
    plan_id: str,
    size: RequestSize,
    placement: Placement,
    legs: tuple[Leg, ...],
    answer: Candidate,
    prefill: Candidate | None,
) -> ExecutionPlan:
    return ExecutionPlan(
        plan_id=PlanId(plan_id),
        request_ids=(size.request_id,),
        target_instance_id=answer.instance,
        legs=legs,
        graph=partial(_graph, size, placement, answer, prefill),
    )


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


def _side(instance: Instance, candidate: Candidate) -> Side:
    """What was sent to an instance lately is no guess at what it holds where it has no prefix cache: in LMDeploy's own
    roles, and not where those are the gateway's alone and prompts go through the tiers.
    """
    domains = _NO_DOMAINS if instance.stats is None else instance.stats.transports
    keeps = instance.role is EngineRole.HYBRID or KVTransport.TIERS in domains
    return Side(
        device=Device(instance.id),
        held_tokens=candidate.expected_tokens if keeps else candidate.matched_tokens,
        requests=candidate.in_flight,
        computing_tokens=candidate.prefill_tokens,
        domains=domains,
    )


__all__ = ["PrefillSide", "RequestSize", "Separation"]
