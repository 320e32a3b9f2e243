"""Which eviction policy is in charge of each tier of an engine, and how another one takes over.

The new policy learns of every resident block and of what is held before it takes the old one's place; if that fails,
the old one has never stopped. No block moves and no request notices. Counts of what was asked for and found go on;
those of one policy are what was added since its swap.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from engines.control.calls import CALL_TIMEOUT_S, CallEngine, EngineBusyError
from engines.control.errors import RefusedError
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.policy_control import AdaptiveReport, EvictionReport, PolicyChange, PolicyInCharge
from kvcontrol.kv_policy import POLICIES, AdaptivePolicy, EvictionPolicy, ShadowPolicies, make_policy
from kvcontrol.kv_policy.spec import PolicySpec
from kvcontrol.kv_runtime import HierarchyManager
from kvcontrol.kv_runtime.residency import Loss

EVICTION: Final = "eviction"
_HBM = CacheTier.HBM
_PART_BLOCKS: Final = 8_192
"""Resident blocks that a new policy learns of between two steps."""

MakePolicy = Callable[[], EvictionPolicy]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionCounts:
    """Counters of one tier over the engine's life; ``query`` is None if it is not counted. HBM counts tokens."""

    resident_blocks: int
    evicted_blocks: int
    query: int | None
    hit: int


class EvictionTarget(Protocol):
    """One tier with an eviction policy. Only the engine's thread swaps policies; other methods are for any thread."""

    @property
    def capacity_blocks(self) -> int:
        """How many blocks the tier can hold."""

    @property
    def policy_name(self) -> str | None:
        """The policy that chooses now; None: the one that was put in charge last."""

    @property
    def policy(self) -> EvictionPolicy | None:
        """The policy itself, None where it is not one."""

    def counts(self) -> EvictionCounts:
        """Return the tier's counters."""

    @property
    def is_swapping(self) -> bool:
        """Whether a swap has begun and not ended."""

    def begin_swap(self, make: MakePolicy) -> None:
        """Begin a swap: another policy learns the blocks; raises ``RefusedError`` if none of ours can choose.

        The old policy goes on choosing until ``end_swap``, and another swap that had begun is given up.
        """

    def continue_swap(self, blocks: int) -> int:
        """Let the new policy learn of so many blocks more, and return how many are missing. O(``blocks``)."""

    def end_swap(self) -> None:
        """End a swap: the new policy receives missing and held blocks, and becomes active."""


class EngineCache(EvictionTarget, Protocol):
    """An engine's own prefix cache, in HBM: shadow policies follow its requests."""

    @property
    def shadows(self) -> ShadowPolicies | None:
        """The candidates that follow the requests."""

    def watch(self, shadows: ShadowPolicies) -> None:
        """Let these follow the requests from now on; raises ``RefusedError`` where none can. The engine's thread."""


class TierBelow:
    """A tier below HBM, which has one policy a tenant."""

    policy = None
    policy_name = None

    def __init__(self, hierarchy: HierarchyManager, tier: CacheTier) -> None:
        self._hierarchy = hierarchy
        self._tier = tier

    @property
    def capacity_blocks(self) -> int:
        return self._hierarchy.stats().tiers[self._tier].capacity_blocks

    def counts(self) -> EvictionCounts:
        stats = self._hierarchy.stats().tiers[self._tier]
        return EvictionCounts(
            resident_blocks=stats.used_blocks + stats.held_blocks,
            evicted_blocks=sum(stats.losses.get(loss, 0) for loss in (Loss.EVICTED, Loss.EVICTED_LAST)),
            query=None,
            hit=sum(stats.hits.values()),
        )

    @property
    def is_swapping(self) -> bool:
        return self._hierarchy.policies.is_swapping(self._tier)

    def begin_swap(self, make: MakePolicy) -> None:
        self._hierarchy.policies.begin_swap(self._tier, make)

    def continue_swap(self, blocks: int) -> int:
        return self._hierarchy.policies.continue_swap(self._tier, blocks)

    def end_swap(self) -> None:
        self._hierarchy.policies.end_swap(self._tier)


class _InCharge:
    """The active policy of one tier, and the tier's counters at the start of the policy."""

    __slots__ = ("began_s", "hit", "query", "spec", "swaps")

    def __init__(self, name: str) -> None:
        self.spec = PolicySpec(text=name, name=name, parameters={})
        self.began_s = time.monotonic()
        self.query = self.hit = self.swaps = 0

    def replaced_by(self, spec: PolicySpec, counts: EvictionCounts) -> None:
        self.spec, self.began_s = spec, time.monotonic()
        self.query, self.hit = counts.query or 0, counts.hit


class EvictionControl:
    """The eviction policies of one engine. Kinds are ``eviction`` (HBM), ``eviction:ddr`` and ``eviction:nvme``.

    ``first_policy`` is the name of what chooses in a tier before any swap.
    """

    def __init__(
        self,
        cache: EngineCache,
        hierarchy: Callable[[], HierarchyManager | None],
        call: CallEngine,
        *,
        first_policy: Callable[[CacheTier], str],
    ) -> None:
        self._cache = cache
        self._hierarchy = hierarchy
        self._call = call
        self._first_policy = first_policy
        self._in_charge: dict[CacheTier, _InCharge] = {}
        self._coming: dict[CacheTier, PolicySpec] = {}
        """Each tier's next policy, while it learns of the blocks; the engine's thread."""

    def kinds(self) -> dict[str, CacheTier]:
        """Return the kinds of this engine's policies, with the tier of each."""
        return {kind_of(tier): tier for tier in self._targets()}

    def tier_of(self, change: PolicyChange) -> CacheTier:
        """Return the tier that a change is for; raises ``RefusedError`` where it names none or two."""
        kinds = self.kinds()
        if change.tier is None:
            return kinds[change.kind]
        if change.kind != EVICTION:
            raise RefusedError(f"kind {change.kind!r} names a tier already; leave out tier {change.tier!r}")
        for tier in kinds.values():
            if tier.value.lower() == change.tier.lower():
                return tier
        raise RefusedError(f"unknown tier {change.tier!r}; tiers of this instance: {', '.join(kinds.values())}")

    def swap(self, tier: CacheTier, spec: PolicySpec) -> None:
        """Swap the policy of a tier, in parts between steps, so that no request waits for long.

        Raises ``EngineBusyError`` when that takes too long; who asks again goes on where it ended.
        """
        until_s = time.monotonic() + CALL_TIMEOUT_S
        part = partial(self.swap_part, tier, spec, blocks=_PART_BLOCKS, counts=True)
        while not self._call(part, timeout_s=max(0.0, until_s - time.monotonic())):
            if time.monotonic() > until_s:
                raise EngineBusyError(f"policy {spec.text} still learns of the blocks in {tier.value}")

    def swap_part(self, tier: CacheTier, spec: PolicySpec, *, blocks: int | None, counts: bool) -> bool:
        """Put a policy in charge of a tier, and return whether it is; the engine's thread.

        It learns of so many ``blocks`` at most (None: of all); call again when that isn't enough. Nothing has changed
        when it raises, and nothing happens when the policy is in charge already: a client that didn't get the answer
        may ask again.
        """
        target, in_charge = self._targets()[tier], self._of(tier)
        make = partial(make_policy, spec.name, capacity_blocks=target.capacity_blocks, parameters=spec.parameters)
        make()  # is there such a policy?
        if self._runs(target, in_charge.spec, spec):
            return True
        found = target.counts()
        if self._coming.pop(tier, None) != spec or not target.is_swapping:
            target.begin_swap(make)
        if blocks is not None and target.continue_swap(blocks) > blocks:
            self._coming[tier] = spec
            return False
        target.end_swap()
        in_charge.replaced_by(spec, found)
        in_charge.swaps += counts
        return True

    def report(self) -> list[PolicyInCharge]:
        """Return the active policy of each tier, with its statistics; any thread."""
        return [self._reported(tier, target) for tier, target in self._targets().items()]

    def _runs(self, target: EvictionTarget, present: PolicySpec, spec: PolicySpec) -> bool:
        if target.policy_name not in {None, present.name} or present.name != spec.name:
            return False
        values = POLICIES[spec.name].values
        return values(present.parameters) == values(spec.parameters)

    def _reported(self, tier: CacheTier, target: EvictionTarget) -> PolicyInCharge:
        in_charge, counts, policy = self._of(tier), target.counts(), target.policy
        name, parameters = in_charge.spec.name, in_charge.spec.parameters
        if (other := target.policy_name) not in {None, name}:  # the engine has put it in charge by itself
            name, parameters = str(other), {}
        queried = None if counts.query is None else counts.query - in_charge.query
        hits = counts.hit - in_charge.hit
        report = EvictionReport(
            tier=tier,
            capacity_blocks=target.capacity_blocks,
            resident_blocks=counts.resident_blocks,
            evicted_blocks=counts.evicted_blocks,
            unit="tokens" if tier is _HBM else "blocks",
            query=counts.query,
            hit=counts.hit,
            query_since_swap=queried,
            hit_since_swap=hits,
            hit_ratio_since_swap=hits / queried if queried else None,
            swaps=in_charge.swaps,
            in_charge_s=round(time.monotonic() - in_charge.began_s, 3),
            adaptive=_adaptive(policy) if isinstance(policy, AdaptivePolicy) else None,
        )
        return PolicyInCharge(
            kind=kind_of(tier),
            name=name,
            params=dict(parameters),
            effective_params=dict(POLICIES[name].values(parameters)) if name in POLICIES else {},
            eviction=report,
        )

    def _of(self, tier: CacheTier) -> _InCharge:
        found = self._in_charge.get(tier)
        return self._in_charge.setdefault(tier, _InCharge(self._first_policy(tier))) if found is None else found

    def _targets(self) -> Mapping[CacheTier, EvictionTarget]:
        hierarchy = self._hierarchy()
        targets: dict[CacheTier, EvictionTarget] = {_HBM: self._cache}
        if hierarchy is not None:
            targets |= {tier: TierBelow(hierarchy, tier) for tier in hierarchy.stats().tiers}
        return targets


def kind_of(tier: CacheTier) -> str:
    """Return the kind of policies that choose a tier's victims."""
    return EVICTION if tier is _HBM else f"{EVICTION}:{tier.value.lower()}"


def _adaptive(policy: AdaptivePolicy) -> AdaptiveReport:
    state = policy.state()
    weight, follows = (None if math.isinf(each) else each for each in (state.weight, state.follows))
    return AdaptiveReport(
        weight=weight,
        follows=follows,
        hits=state.hits,
        lru_hits=state.lru_hits,
        behind_blocks=state.behind_blocks,
        switches=state.switches,
    )
