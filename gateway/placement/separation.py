"""Turns a chosen instance into a plan: where the prompt is computed, and the calls to make.

On the way of a request this costs a few microseconds: the legs are a table (``plan_legs``), and the graph is built when
``/explain`` draws it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from gateway.placement.plan_legs import Legs, hybrid_legs, separated_legs
from gateway.registry import Instance
from gateway.routing import NOTHING_HELD, Candidate, Field, Held
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
    PassContext,
    PDSeparator,
    Placement,
    PlanId,
    PrefixCacheAwarePass,
    Side,
    Split,
)

_MOST_SHAPES: Final = 4096
"""Pairs of instances whose calls are kept; they are put together again when there are more."""
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
    """Keeps the legs of plans by their instances; ``separator`` decides."""

    def __init__(self, separator: PDSeparator) -> None:
        self._separator = separator
        self._legs: dict[tuple[InstanceId, InstanceId, KVTransport, bool, bool], Legs] = {}
        self._here: dict[tuple[InstanceId, bool], tuple[Placement, Legs]] = {}

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
            legs = hybrid_legs(device, holds=shape[1])
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
            legs = self._legs[shape] = separated_legs(
                placement.answer,
                handover.prefill,
                handover.transport,
                answer_holds=shape[3],
                prefill_holds=shape[4],
            )
        graph = partial(_graph, size, placement, answer, prefill)
        return ExecutionPlan(PlanId(plan_id), (size.request_id,), answer.instance, legs, graph)

    def forget(self, instance: InstanceId) -> None:
        """An instance is gone."""
        self._here.pop((instance, False), None)
        self._here.pop((instance, True), None)
        for shape in [each for each in self._legs if instance in each[:2]]:
            del self._legs[shape]


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
    columns, held = field.columns, field.held
    return [
        _side(each, held.get(at, NOTHING_HELD), runs - each.foreign_requests, queued)
        for at, (each, runs, queued) in enumerate(zip(instances, columns.running, columns.queued, strict=True))
    ]


def _side(instance: Instance, held: Held, requests: int, computing_tokens: int) -> Side:
    """What was sent to an instance lately is no guess at what it holds where it has no prefix cache: in LMDeploy's own
    roles, and not where those are the gateway's alone and prompts go through the tiers.
    """
    domains = _NO_DOMAINS if instance.stats is None else instance.stats.transports
    keeps = instance.role is EngineRole.HYBRID or KVTransport.TIERS in domains
    return Side(Device(instance.id), held[2] if keeps else held[0], requests, computing_tokens, domains)
