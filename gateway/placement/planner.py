"""From a fingerprint and the usable instances to a plan: match what is cached where, then ask the policy; and from the
answer back to what is known.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

from gateway.fingerprint import Fingerprint, Gap
from gateway.placement.candidates import Candidates
from gateway.placement.lookups import Cached, Lookups
from gateway.placement.separation import PrefillSide, RequestSize, Separation
from gateway.registry import Instance, LoadTracker
from gateway.routing import (
    Calibration,
    Candidate,
    Decision,
    Guess,
    LearnedAffinity,
    Query,
    RecentRoutes,
    RoutingPolicy,
    Speeds,
)
from gateway.routing.learned import BLOCK_TOKENS, TEXT_BLOCK_TOKENS
from gateway.routing.scoring import before_tokens
from gateway.types import Usage
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import InstanceId
from kvcontrol.core.roles import EngineRole
from kvcontrol.prefix_reuse import FleetIndex
from kvcontrol.scheduler_ir import ExecutionPlan, HybridOnly, Split

_KEY_TOKENS = 256
_UNSIZED = RequestSize()
_MOST_HOMES = 1 << 18
"""Blocks, of about 100 bytes each."""
_CONTRADICTIONS = 5
"""So many answers in a row that found less in HBM than their instance had announced are no coincidence."""


class Plan(NamedTuple):
    """Where one request goes, and why. ``matched_tokens`` are those that the instance is known to hold.
    ``predicted_s`` is the expected time to the first token, None where the policy doesn't count in seconds. ``guess``
    is set for an instance that publishes nothing, ``textual`` when its blocks are of text; ``exact`` when all blocks
    have the names that engines give them. ``execution`` is what is to
    be done, call by call; ``candidates`` are who could have got it, as they are when somebody first looks. ``split``
    says whether the prompt is computed elsewhere first, by ``prefill``, and why (None: nobody computes prompts for
    others). ``uncached_tokens`` are those that ``instance`` computes itself.
    """

    instance: Instance
    policy: str
    decision: Decision
    execution: ExecutionPlan
    matched_tokens: int
    uncached_tokens: int
    predicted_s: float | None = None
    guess: Guess | None = None
    textual: bool = False
    exact: bool = True
    candidates: Sequence[Candidate] = ()
    split: Split | None = None
    prefill: PrefillSide | None = None

    @property
    def cold(self) -> bool:
        return not self.decision.candidate.expected_tokens

    @property
    def others(self) -> Mapping[InstanceId, Instance]:
        """The instances that have legs before the answer."""
        return {} if self.prefill is None else {self.prefill.instance.id: self.prefill.instance}

    @property
    def elsewhere_tokens(self) -> int:
        """Tokens of the prompt that another instance computes."""
        return 0 if self.prefill is None or self.split is None else self.split.uncached_tokens or 0

    def route(self, attempt: int) -> str:
        """Return the ``x-kvgate-route`` header: ``prefix;matched=1536;tier=hbm;reason=longest_match``."""
        parts = [self.decision.basis, f"matched={self.matched_tokens}"]
        if self.decision.candidate.matched_tiers:
            parts.append("tier=" + "+".join(tier.lower() for tier in self.decision.candidate.matched_tiers))
        parts.append(f"reason={self.decision.reason}")
        if self.split is not None:
            parts.append(f"pd={self.split.reason}")
        if self.prefill is not None:
            parts.append(f"prefill={self.prefill.instance.id}")
        if attempt > 1:
            parts.append(f"attempt={attempt}")
        return ";".join(parts)


class Planner:
    """Joins the residency index, the load, the speeds and the policy."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        *,
        policy: RoutingPolicy,
        index: FleetIndex,
        load: LoadTracker,
        recent: RecentRoutes,
        learned: LearnedAffinity,
        calibration: Calibration,
        clock: Callable[[], float],
        on_contradiction: Callable[[InstanceId, str], None] = lambda *_: None,
        separation: Separation | None = None,
        prefilling: Callable[[str], Sequence[Instance]] = lambda _: (),
        process: str = "0",
        session_memory_s: float = 3600.0,
    ) -> None:
        """``prefilling`` says who may compute a prompt of a model for others; ``separation`` whether that is done, None
        that it never is. ``process`` tells its plans' ids from those of others. ``session_memory_s`` is for how long a
        prompt whose blocks no event will confirm attracts those that go on with it.
        """
        self._policy = policy
        homes = RecentRoutes(lifetime_s=session_memory_s, capacity_blocks=_MOST_HOMES)
        self._candidates = Candidates(
            index=index,
            load=load,
            recent=recent,
            homes=homes,
            learned=learned,
            calibration=calibration,
            clock=clock,
        )
        self._recent = recent
        self._homes = homes
        self._learned = learned
        self._calibration = calibration
        self._clock = clock
        self._on_contradiction = on_contradiction
        self._separation = separation or Separation(HybridOnly())
        self._prefilling = prefilling
        self._process = process
        self._plans = 0
        self._contradictions: dict[InstanceId, int] = {}

    @property
    def policy(self) -> str:
        return self._policy.name

    def swap(self, policy: RoutingPolicy) -> None:
        """Use another policy from now on; known residency, load and speeds stay."""
        self._policy = policy

    def joined(self, instance: InstanceId) -> None:
        """Nothing is known of a new instance yet."""

    def left(self, instance: InstanceId) -> None:
        """Forget a removed instance."""
        self._recent.forget(instance)
        self._homes.forget(instance)
        self._learned.forget(instance)
        self._calibration.forget(instance)
        self._separation.forget(instance)
        self._candidates.forget(instance)
        self._contradictions.pop(instance, None)

    def speeds(self, instance: Instance) -> Speeds | None:
        """Return how fast an instance is; None before anything is known."""
        return self._candidates.speeds(instance)

    def plan(
        self,
        fingerprint: Fingerprint | Gap,
        instances: Sequence[Instance],
        *,
        session: bytes | None = None,
        size: RequestSize = _UNSIZED,
        without: AbstractSet[InstanceId] = frozenset(),
    ) -> Plan:
        """Choose among ``instances`` (at least one), and remember it; nobody of ``without`` computes the prompt for
        another. O(blocks of the prompt + instances).
        """
        self._plans += 1
        plan, cached = self._decide(fingerprint, instances, session, size, without)
        if cached is not None and not plan.exact and plan.guess is None:
            self._homes.remember(cached.hashes, plan.instance.id, self._clock())
        elif cached is not None:
            held = plan.matched_tokens // cached.block_tokens
            self._recent.remember(cached.hashes[held:], plan.instance.id, self._clock())
        return plan

    def consider(
        self,
        fingerprint: Fingerprint | Gap,
        instances: Sequence[Instance],
        *,
        session: bytes | None = None,
        size: RequestSize = _UNSIZED,
    ) -> Plan:
        """Return what ``plan`` would, and change nothing that it depends on."""
        plan = self._decide(fingerprint, instances, session, size, frozenset())[0]
        return plan._replace(candidates=tuple(plan.candidates))

    def began(self, plan: Plan, *, took_s: float) -> None:
        """Note that a request's first token has come, ``took_s`` after it was sent. What another instance's work took
        says nothing about this one's speed.
        """
        if plan.prefill is not None:
            return
        candidate = plan.decision.candidate
        self._calibration.observe(
            plan.instance.id,
            tokens=plan.uncached_tokens + before_tokens(candidate, plan.uncached_tokens),
            running=candidate.running,
            took_s=took_s,
        )
        self._candidates.observed(plan.instance.id)

    def computed(self, plan: Plan) -> None:
        """Note that an instance has taken a request's prompt into its cache."""
        if plan.guess is not None:
            self._learned.computed(plan.guess)

    def ended(self, plan: Plan, usage: Usage | None, *, took_s: float) -> int:
        """Note that a request was answered in full. Returns how many tokens less than expected were found cached."""
        self._calibration.ended(took_s)
        if usage is None or usage.cached_tokens is None or not usage.prompt_tokens:
            return 0
        if plan.guess is not None:
            size = TEXT_BLOCK_TOKENS if plan.textual else BLOCK_TOKENS
            blocks = usage.prompt_tokens / size if plan.exact else len(plan.guess.hashes) + 1
            held = int(usage.cached_tokens / usage.prompt_tokens * blocks)
            return self._learned.answered(plan.guess, held=held) * size
        return self._compare(plan, usage.cached_tokens) if plan.exact else 0

    def _compare(self, plan: Plan, cached_tokens: int) -> int:
        """An instance that announces its blocks: is it true? Only of HBM, as it may rather compute than load."""
        stats = plan.instance.stats
        if stats is None:
            return 0
        announced = plan.decision.candidate.tokens_by_tier.get(CacheTier.HBM, 0)
        missing = announced - cached_tokens
        if missing <= stats.identity.block_size_tokens:
            if announced:
                self._contradictions.pop(plan.instance.id, None)
            return max(0, missing)
        times = self._contradictions.get(plan.instance.id, 0) + 1
        self._contradictions[plan.instance.id] = times
        if times >= _CONTRADICTIONS:
            del self._contradictions[plan.instance.id]
            self._on_contradiction(plan.instance.id, f"{times} answers in a row found less cached than was announced")
        return missing

    def _decide(
        self,
        fingerprint: Fingerprint | Gap,
        instances: Sequence[Instance],
        session: bytes | None,
        size: RequestSize,
        without: AbstractSet[InstanceId],
    ) -> tuple[Plan, Cached | None]:
        lookups = self._candidates.lookups(fingerprint)
        candidates = self._candidates.of(instances, lookups)
        known = lookups.any
        gap: Gap | None
        if isinstance(fingerprint, Fingerprint):
            gap, tokens = (None, fingerprint.tokens) if known else (fingerprint.gap, None)
            unnamed = fingerprint.gap
            key: bytes | Callable[[], bytes] = session or partial(fingerprint.beginning, _KEY_TOKENS)
            query = Query(prompt_tokens=tokens, gap=gap, candidates=candidates, key=key)
            textual = fingerprint.textual
        else:
            tokens, textual, unnamed = None, False, None
            query = Query(prompt_tokens=None, gap=fingerprint, candidates=candidates, key=session)
        decision = self._policy.choose(query)
        answer = decision.candidate
        place = candidates.columns.places[answer.instance]
        chosen = instances[place]
        if unnamed is not None and chosen.stats is not None and decision.reason == "cold":
            decision = decision._replace(reason=unnamed)
        cached = candidates.cached(place)
        guess = None
        if cached is not None and chosen.stats is None:
            guess = self._learned.guess(chosen.id, cached.hashes, answer.matched_tokens // cached.block_tokens)
        split, prefill = self._split(fingerprint, chosen, answer, lookups, size, without)
        plan_id = f"plan-{self._process}-{self._plans}"
        if split is None or prefill is None:
            execution = self._separation.hybrid(plan_id, size, answer)
            uncached, predicted_s = max(0, (tokens or 0) - answer.expected_tokens), decision.wait_s
        else:
            execution = self._separation.plan(plan_id, size, split.placement, answer, prefill.candidate)
            uncached, predicted_s = 0, None
        plan = Plan(
            instance=chosen,
            policy=self._policy.name,
            decision=decision,
            execution=execution,
            matched_tokens=answer.matched_tokens,
            uncached_tokens=uncached,
            predicted_s=predicted_s,
            guess=guess,
            textual=textual,
            exact=unnamed is None,
            candidates=candidates,
            split=split,
            prefill=prefill,
        )
        return plan, cached

    def _split(  # noqa: PLR0913, PLR0917 - all that a decision stands on
        self,
        fingerprint: Fingerprint | Gap,
        chosen: Instance,
        answer: Candidate,
        lookups: Lookups,
        size: RequestSize,
        without: AbstractSet[InstanceId],
    ) -> tuple[Split | None, PrefillSide | None]:
        """Say whether the prompt is computed elsewhere, and by whom; None where nobody computes prompts for others."""
        if not isinstance(fingerprint, Fingerprint) or not (fingerprint.gap is None or fingerprint.textual):
            return None, None
        prefilling = self._prefilling(fingerprint.model)
        if not prefilling:
            return None, None
        if without or chosen.role is EngineRole.PREFILL:  # it answers itself, as nobody else can
            prefilling = [each for each in prefilling if each.id not in without and each.id != chosen.id]
        field = self._candidates.of(prefilling, lookups) if prefilling else None
        split = self._separation.split(size, chosen, answer, prefilling, field)
        handover = split.placement.handover
        if handover is None or field is None:
            return split, None
        place = field.columns.places[InstanceId(handover.prefill)]
        return split, PrefillSide(prefilling[place], field.at(place))
