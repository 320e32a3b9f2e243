"""From a fingerprint and the usable instances to a plan: match what is cached where, then ask the policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.fingerprint import Fingerprint, Gap
from gateway.registry import Instance, LoadTracker
from gateway.routing import Candidate, Decision, Query, RecentRoutes, RoutingPolicy
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.ids import BlockHash, InstanceId
from kvcontrol.prefix_reuse import FleetIndex, PrefixMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where one request goes, and why. ``matched_tokens`` are those that the instance is known to hold."""

    instance: Instance
    policy: str
    decision: Decision
    matched_tokens: int
    uncached_tokens: int

    @property
    def cold(self) -> bool:
        return not self.decision.candidate.expected_tokens

    def route(self, attempt: int) -> str:
        """Return the ``x-kvgate-route`` header: ``prefix;matched=1536;tier=hbm;reason=longest_match``."""
        parts = [self.decision.basis, f"matched={self.matched_tokens}"]
        if self.decision.candidate.matched_tiers:
            parts.append("tier=" + "+".join(tier.lower() for tier in self.decision.candidate.matched_tiers))
        parts.append(f"reason={self.decision.reason}")
        if attempt > 1:
            parts.append(f"attempt={attempt}")
        return ";".join(parts)


class Planner:
    """Joins the residency index, the load and the policy. Changes nothing but the memory of what was just routed."""

    def __init__(
        self,
        *,
        policy: RoutingPolicy,
        index: FleetIndex,
        load: LoadTracker,
        recent: RecentRoutes,
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._index = index
        self._load = load
        self._recent = recent
        self._clock = clock

    def joined(self, instance: InstanceId) -> None:
        """Nothing is known of a new instance yet."""

    def left(self, instance: InstanceId) -> None:
        """Forget what was sent to an instance that is gone."""
        self._recent.forget(instance)

    @property
    def policy(self) -> str:
        return self._policy.name

    def plan(self, fingerprint: Fingerprint | Gap, instances: Sequence[Instance]) -> Plan:
        """Choose among ``instances`` (at least one). O(blocks of the prompt + instances)."""
        now_s = self._clock()
        matches: dict[CacheIdentity, tuple[Sequence[BlockHash], Mapping[InstanceId, PrefixMatch]]] = {}
        if isinstance(fingerprint, Fingerprint):
            for identity in {each.stats.identity for each in instances if each.stats is not None}:
                hashes = fingerprint.hashes(identity)
                matches[identity] = hashes, self._index.match(hashes)
        candidates = tuple(self._candidate(each, matches, now_s) for each in instances)
        gap = fingerprint if isinstance(fingerprint, Gap) else None if matches else Gap.NO_CACHE_REPORT
        tokens = fingerprint.tokens if isinstance(fingerprint, Fingerprint) else None
        decision = self._policy.choose(Query(prompt_tokens=tokens, gap=gap, candidates=candidates))
        chosen = next(each for each in instances if each.id == decision.candidate.instance)
        if chosen.stats is not None and chosen.stats.identity in matches:
            identity = chosen.stats.identity
            held = decision.candidate.matched_tokens // identity.block_size_tokens
            self._recent.remember(matches[identity][0][held:], chosen.id, now_s)
        return Plan(
            instance=chosen,
            policy=self._policy.name,
            decision=decision,
            matched_tokens=decision.candidate.matched_tokens,
            uncached_tokens=(tokens or 0) - decision.candidate.expected_tokens,
        )

    def _candidate(
        self,
        instance: Instance,
        matches: Mapping[CacheIdentity, tuple[Sequence[BlockHash], Mapping[InstanceId, PrefixMatch]]],
        now_s: float,
    ) -> Candidate:
        load = self._load.of(instance.id)
        matched = expected = 0
        tiers: tuple[CacheTier, ...] = ()
        if instance.stats is not None and instance.stats.identity in matches:
            identity = instance.stats.identity
            hashes, held = matches[identity]
            match = held.get(instance.id)
            blocks = 0
            if match is not None:
                blocks = match.blocks
                tiers = tuple(tier for tier in CacheTier if match.by_tier.get(tier))
            matched = blocks * identity.block_size_tokens
            coming = self._recent.expected(hashes[blocks:], instance.id, now_s)
            expected = (blocks + coming) * identity.block_size_tokens
        return Candidate(
            instance=instance.id,
            matched_tokens=matched,
            matched_tiers=tiers,
            expected_tokens=expected,
            in_flight=load.in_flight,
            prefill_tokens=load.prefill_tokens,
            foreign_requests=instance.foreign_requests,
            last_turn=load.last_turn,
            last_cold_turn=load.last_cold_turn,
        )


__all__ = ["Plan", "Planner"]
