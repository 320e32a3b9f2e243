"""What chooses victims in an engine, tier by tier: shown, and exchanged between two steps of the engine.

What orders its waiting queue and what paces its steps are shown and exchanged beside it
(``schedule/schedule_operations.py``, ``schedule/pace_operations.py``).

A change is checked as a whole before the engine hears of it: one that can't be costs it nothing, and is refused also
while it is busy. The new policy is told of every resident block and of what is
held, on the engine's thread, before it takes the old one's place; if that fails, the old one has never stopped. No
block moves, no request notices. Counts of what was asked for and found go on; each policy's own are what has been added
since its swap.
"""

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from engines.control.policy_changes import change_of, pace_of, policy_of, strategy_of
from engines.control.shadow_report import check_shadow, shadow_body, shadows_of
from engines.events.publisher import EventPublisher, Operation, RefusedError
from engines.lmdeploy.engine_calls import EngineBusyError, EngineCalls
from engines.lmdeploy.offload.tiers import EngineTiers
from engines.lmdeploy.schedule.pace_operations import PACE, PaceOperations, pace_of_settings
from engines.lmdeploy.schedule.schedule_operations import SCHEDULE, ScheduleOperations
from engines.lmdeploy.settings import EngineSettings
from engines.lmdeploy.trie.eviction import TrieEviction, eviction_of
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.policy_control import (
    AdaptiveReport,
    EvictionReport,
    PolicyChange,
    PolicyInCharge,
    PolicyParams,
    PolicyReport,
)
from kvcontrol.kv_policy import (
    POLICIES,
    AdaptivePolicy,
    EvictionPolicy,
    LruPolicy,
    PolicyError,
    ShadowPolicies,
    make_policy,
)
from kvcontrol.kv_policy.spec import PolicySpec, parse_spec
from kvcontrol.kv_runtime import HierarchyManager
from kvcontrol.kv_runtime.residency import Loss
from kvcontrol.scheduler_ir.pacing import PACES
from kvcontrol.scheduler_ir.strategies import STRATEGIES

POLICY = b"policy"
SET_POLICY = b"set_policy"

_CALL_TIMEOUT_S = 1.5
"""Less than the api_server waits: a busy engine is told as busy."""
_PART_BLOCKS: Final = 8_192
"""Resident blocks that a new policy is told of between two steps."""
_HBM = CacheTier.HBM
_EVICTION = "eviction"
_SHADOW = "shadow"

_Answer = TypeVar("_Answer")


class PolicySetupError(RuntimeError):
    """A policy that the settings name can't be used; the message names the setting and what is possible."""


class _InCharge:
    """What decides in one tier, and what had been counted when it began to."""

    __slots__ = ("began_s", "choice", "found", "swaps")

    def __init__(self) -> None:
        self.choice = PolicySpec(text=LruPolicy.name, name=LruPolicy.name, parameters={})
        self.began_s = time.monotonic()
        self.found: tuple[int | None, int] = (None, 0)
        self.swaps = 0

    def replaced_by(self, choice: PolicySpec, found: tuple[int | None, int]) -> None:
        self.choice, self.found, self.began_s = choice, found, time.monotonic()


class PolicyOperations:
    """The policies of one engine. Operations come on the publisher's thread; changes run on the engine's."""

    def __init__(self, engine: Any, tiers: EngineTiers | None, calls: EngineCalls) -> None:
        self._engine = engine
        self._tiers = tiers
        self._calls = calls
        self._in_charge: dict[CacheTier, _InCharge] = {}
        self._schedule = ScheduleOperations(engine)
        self._pace = PaceOperations(engine)
        self._coming: dict[CacheTier, PolicySpec] = {}
        """Each tier's next policy, while it is being told of the blocks; the engine's thread."""
        self.refused = 0

    def table(self) -> dict[bytes, Operation]:
        """Return the operations by name."""
        return {POLICY: self._show, SET_POLICY: self._set}

    def begin(self, settings: EngineSettings) -> None:
        """Put the settings' policies in charge, before the engine's first step. Raises ``PolicySetupError``."""
        wanted = {_HBM: settings.hbm_policy, CacheTier.DDR: settings.ddr_policy, CacheTier.NVME: settings.nvme_policy}
        try:
            for tier, text in wanted.items():
                if text is not None and (tier is _HBM or tier in self._below()):
                    self._use(tier, parse_spec(text), blocks=None, counts=False)
            self._schedule.use(parse_spec(settings.schedule), counts=False)
            if self._pace.is_possible or settings.pace is not None:
                on_gpu = self._engine.engine_config.device_type != "cpu"
                self._pace.use(pace_of_settings(settings, on_gpu=on_gpu), counts=False)
            if eviction_of(self._engine.scheduler.block_trie) is not None:
                self._watch(self._shadows_of(settings.shadow_policies))
        except (PolicyError, RefusedError) as error:
            raise PolicySetupError(f"a policy of the engine's settings can't be used: {error}") from error

    def swaps(self) -> dict[CacheTier, int]:
        """Return how often each tier's policy was exchanged; any thread."""
        return {tier: self._of(tier).swaps for tier in self._tiers_there()}

    def report(self) -> PolicyReport:
        """Return what decides, and what else might; any thread (then numbers may be a moment apart)."""
        shadow = self._shadow()
        policies = [self._in_charge_of(tier) for tier in self._tiers_there()]
        policies.append(
            PolicyInCharge(kind=_SHADOW, name=",".join(shadow.candidates), params={}, shadow=shadow_body(shadow))
        )
        policies += [each for each in (self._schedule.in_charge(), self._pace.in_charge()) if each is not None]
        return PolicyReport(
            policies=policies,
            available={name: kind.summary for name, kind in POLICIES.items()},
            strategies={name: kind.summary for name, kind in STRATEGIES.items()},
            paces={name: kind.summary for name, kind in PACES.items()},
        )

    def _show(self, _: EventPublisher, body: bytes) -> bytes:
        del body
        return msgspec.json.encode(self.report())

    def _set(self, _: EventPublisher, body: bytes) -> bytes:
        try:
            change = change_of(body)
            if change.kind == SCHEDULE:
                self._between_steps(partial(self._schedule.use, strategy_of(change), counts=True))
                return msgspec.json.encode(self.report())
            if change.kind == PACE:
                self._between_steps(partial(self._pace.use, pace_of(change), counts=True))
                return msgspec.json.encode(self.report())
            tier = self._tier_of(change)
            if tier is None:
                self._between_steps(partial(self._watch, self._shadows_of(change.name)))
            else:
                self._exchange(tier, policy_of(change))
        except PolicyError as error:
            self.refused += 1
            raise RefusedError(str(error)) from error
        except RefusedError:
            self.refused += 1
            raise
        return msgspec.json.encode(self.report())

    def _tier_of(self, change: PolicyChange) -> CacheTier | None:
        """Return the tier whose policy is to be exchanged; None for the shadows."""
        kinds = {_kind_of(tier): tier for tier in self._tiers_there()}
        if change.kind == _SHADOW:
            check_shadow(change)
            return None
        if change.kind not in kinds:
            raise RefusedError(
                f"there are no policies of kind {change.kind!r}; this instance has "
                f"{_all((*kinds, _SHADOW, SCHEDULE, PACE))}"
            )
        if change.tier is None:
            return kinds[change.kind]
        if change.kind != _EVICTION:
            raise RefusedError(f"kind {change.kind!r} names a tier already; leave out tier {change.tier!r}")
        for tier in kinds.values():
            if tier.value.lower() == change.tier.lower():
                return tier
        raise RefusedError(f"this instance has no tier {change.tier!r}; it has {_all(kinds.values())}")

    def _exchange(self, tier: CacheTier, choice: PolicySpec) -> None:
        """Put a policy in charge of a tier, a part between two steps of the engine each, so that none waits for long.

        Who asks again after an ``EngineBusyError`` goes on where it ended.
        """
        until_s = time.monotonic() + _CALL_TIMEOUT_S
        part = partial(self._use, tier, choice, blocks=_PART_BLOCKS, counts=True)
        while not self._calls(part, timeout_s=max(0.0, until_s - time.monotonic())):
            if time.monotonic() > until_s:
                raise EngineBusyError(f"{choice.text} is still being told of the blocks in {tier.value}")

    def _use(self, tier: CacheTier, choice: PolicySpec, *, blocks: int | None, counts: bool) -> bool:
        """Put a policy in charge of a tier, and return whether it is; the engine's thread.

        It is told of so many ``blocks`` at most (None: of all), and this is to be called again when that isn't enough.
        Nothing has changed when it raises. Nothing happens when the policy is in charge already: a client that didn't
        get the answer may ask again.
        """
        make = self._maker(tier, choice)
        if self._is_in_charge(tier, choice):
            return True
        found = self._found(tier)
        if tier is _HBM:
            eviction = self._trie_eviction()
            if eviction.failed:
                raise RefusedError("LMDeploy's own eviction has taken over after an error; restart the instance")
            if self._coming.pop(tier, None) != choice or not eviction.has_successor:
                eviction.begin_use(make())
            is_told = blocks is None or eviction.continue_use(blocks) <= blocks
            if is_told:
                eviction.ways_back = self._ways_back
                eviction.end_use()
        else:
            hierarchy = self._hierarchy()
            if self._coming.pop(tier, None) != choice or not hierarchy.is_changing(tier):
                hierarchy.begin_policy(tier, make)
            is_told = blocks is None or hierarchy.continue_policy(tier, blocks) <= blocks
            if is_told:
                hierarchy.end_policy(tier)
        if not is_told:
            self._coming[tier] = choice
            return False
        in_charge = self._of(tier)
        in_charge.replaced_by(choice, found)
        in_charge.swaps += counts
        return True

    def _ways_back(self) -> tuple[float | None, float | None]:
        """Return what a block of HBM costs to get back: both are measured where there are tiers, and nowhere else."""
        hierarchy = None if self._tiers is None else self._tiers.hierarchy
        if hierarchy is None:
            return None, None
        return hierarchy.gate.ways_back(block_tokens=self._engine.cache_config.block_size)

    def _is_in_charge(self, tier: CacheTier, choice: PolicySpec) -> bool:
        present = self._of(tier).choice
        if tier is _HBM and self._trie_eviction().policy.name != present.name:
            return False
        values = POLICIES[choice.name].values
        return present.name == choice.name and values(present.parameters) == values(choice.parameters)

    def _shadows_of(self, candidates: str) -> ShadowPolicies:
        """Return shadow policies as they are written, which follow nothing yet; any thread, O(characters)."""
        return shadows_of(candidates, capacity_blocks=self._capacity(_HBM))

    def _watch(self, shadow: ShadowPolicies) -> None:
        """Follow these from now on; the same ones that are followed already go on counting. The engine's thread."""
        eviction = eviction_of(self._engine.scheduler.block_trie)
        if eviction is None:
            if shadow.candidates:
                raise RefusedError(_RECURRENT)
            return
        present = eviction.shadows.policies
        if present is None or present.candidates != shadow.candidates:
            eviction.settle_now()  # what was asked for until now is not for these to count
            eviction.shadows.policies = shadow

    def _maker(self, tier: CacheTier, choice: PolicySpec) -> Callable[[], EvictionPolicy]:
        capacity_blocks = self._capacity(tier)
        make = partial(make_policy, choice.name, capacity_blocks=capacity_blocks, parameters=choice.parameters)
        make()  # is there such a policy?
        return make

    def _in_charge_of(self, tier: CacheTier) -> PolicyInCharge:
        in_charge = self._of(tier)
        query, hit = self._found(tier)
        query_before, hit_before = in_charge.found
        queried = None if query is None else query - (query_before or 0)
        hits = hit - hit_before
        name, parameters = in_charge.choice.name, in_charge.choice.parameters
        adaptive, evicted, resident = None, 0, 0
        if tier is _HBM:
            eviction = eviction_of(self._engine.scheduler.block_trie)
            if eviction is None or eviction.failed:
                name, parameters = "lmdeploy", {}
            else:
                if eviction.policy.name != name:  # LMDeploy has made its trie anew
                    name, parameters = eviction.policy.name, {}
                evicted, resident = eviction.evicted_blocks, eviction.resident_blocks
                if isinstance(eviction.policy, AdaptivePolicy):
                    adaptive = _adaptive(eviction.policy)
        else:
            stats = self._hierarchy().stats().tiers[tier]
            resident = stats.used_blocks + stats.held_blocks
            evicted = sum(stats.losses.get(loss, 0) for loss in (Loss.EVICTED, Loss.EVICTED_LAST))
        report = EvictionReport(
            tier=tier,
            capacity_blocks=self._capacity(tier),
            resident_blocks=resident,
            evicted_blocks=evicted,
            unit="tokens" if tier is _HBM else "blocks",
            query=query,
            hit=hit,
            query_since_swap=queried,
            hit_since_swap=hits,
            hit_ratio_since_swap=hits / queried if queried else None,
            swaps=in_charge.swaps,
            in_charge_s=round(time.monotonic() - in_charge.began_s, 3),
            adaptive=adaptive,
        )
        effective: PolicyParams = dict(POLICIES[name].values(parameters)) if name in POLICIES else {}
        return PolicyInCharge(
            kind=_kind_of(tier), name=name, params=dict(parameters), effective_params=effective, eviction=report
        )

    def _shadow(self) -> ShadowPolicies:
        eviction = eviction_of(self._engine.scheduler.block_trie)
        shadow = None if eviction is None else eviction.shadows.policies
        return ShadowPolicies((), capacity_blocks=1) if shadow is None else shadow

    def _found(self, tier: CacheTier) -> tuple[int | None, int]:
        """Return what was asked for (None where nobody counts it) and found, ever."""
        if tier is _HBM:
            stats = self._engine.scheduler.block_trie.stats
            return int(stats.num_query_tokens), int(stats.num_hit_tokens)
        return None, sum(self._hierarchy().stats().tiers[tier].hits.values())

    def _capacity(self, tier: CacheTier) -> int:
        if tier is _HBM:
            blocks = self._engine.scheduler.block_manager.num_gpu_blocks
            return int(blocks - self._engine.cache_config.num_reserved_gpu_blocks)
        return self._hierarchy().stats().tiers[tier].capacity_blocks

    def _of(self, tier: CacheTier) -> _InCharge:
        return self._in_charge.setdefault(tier, _InCharge())

    def _tiers_there(self) -> list[CacheTier]:
        return [_HBM, *self._below()]

    def _below(self) -> list[CacheTier]:
        hierarchy = None if self._tiers is None else self._tiers.hierarchy
        return [] if hierarchy is None else list(hierarchy.stats().tiers)

    def _hierarchy(self) -> HierarchyManager:
        if self._tiers is None or self._tiers.hierarchy is None:
            raise RefusedError("this instance has no tiers below HBM")
        return self._tiers.hierarchy

    def _trie_eviction(self) -> TrieEviction:
        eviction = eviction_of(self._engine.scheduler.block_trie)
        if eviction is None:
            raise RefusedError(_RECURRENT)
        return eviction

    def _between_steps(self, work: Callable[[], _Answer]) -> _Answer:
        return self._calls(work, timeout_s=_CALL_TIMEOUT_S)


_RECURRENT = "this model keeps recurrent state: LMDeploy's own eviction chooses what leaves HBM"


def _kind_of(tier: CacheTier) -> str:
    return _EVICTION if tier is _HBM else f"{_EVICTION}:{tier.value.lower()}"


def _all(names: Iterable[str]) -> str:
    return ", ".join(names)


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


__all__ = ["POLICY", "SET_POLICY", "PolicyOperations", "PolicySetupError"]
