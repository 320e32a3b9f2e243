"""Which eviction policy is in charge of each tier of a simulated engine, and how it is exchanged; shadows and the
schedule beside it.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from engines.control.policy_changes import strategy_of
from engines.control.shadow_report import check_shadow, shadow_body, shadows_of
from engines.events.publisher import RefusedError
from engines.sim.engine import SimEngine
from engines.sim.schedule import SCHEDULE, SimSchedule
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.errors import UNREADABLE
from kvcontrol.core.policy_control import EvictionReport, PolicyChange, PolicyInCharge, PolicyReport
from kvcontrol.kv_policy import POLICIES, EvictionPolicy, PolicyError, make_policy
from kvcontrol.kv_policy.spec import PolicySpec
from kvcontrol.kv_runtime.hierarchy_stats import TierStats
from kvcontrol.kv_runtime.residency import Loss
from kvcontrol.scheduler_ir.strategies import STRATEGIES

_HBM = CacheTier.HBM
_EVICTION = "eviction"
_SHADOW = "shadow"
_WORK_EVERY_S: Final = 0.02
_LOOK_EVERY_S: Final = 0.25
"""Between two looks at what shadows are to follow: while there is some, and while there is none."""


class _InCharge:
    __slots__ = ("began_s", "choice", "found", "swaps")

    def __init__(self, name: str) -> None:
        self.choice = PolicySpec(text=name, name=name, parameters={})
        self.began_s = time.monotonic()
        self.found: tuple[int | None, int] = (None, 0)
        self.swaps = 0


class SimPolicies:
    """Belongs to the engine's thread. Kinds are ``eviction``, ``eviction:ddr``, ``eviction:nvme``, ``shadow`` and
    ``schedule``.
    """

    def __init__(self, engine: SimEngine) -> None:
        shape = engine.profile.engine
        self._engine = engine
        self._in_charge = {
            tier: _InCharge(shape.policy if tier is _HBM else shape.tier_policy) for tier in self._tiers()
        }
        self._schedule = SimSchedule(engine)
        self.refused = 0
        self._shadows = shadows_of("", capacity_blocks=shape.hbm_blocks)
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let shadows follow what was asked for, a piece at a time, until ``close``."""
        self.close()
        wait_s = _WORK_EVERY_S if self._shadows.work() else _LOOK_EVERY_S
        self._timer = loop.call_later(wait_s, self.follow, loop)

    def close(self) -> None:
        """Let them follow nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def report(self) -> PolicyReport:
        """Return what decides, and what else might."""
        shadows = self._shadows
        shadow = PolicyInCharge(kind=_SHADOW, name=",".join(shadows.candidates), params={}, shadow=shadow_body(shadows))
        return PolicyReport(
            policies=[*(self._of(tier) for tier in self._tiers()), shadow, self._schedule.in_charge()],
            available={name: kind.summary for name, kind in POLICIES.items()},
            strategies={name: kind.summary for name, kind in STRATEGIES.items()},
        )

    def change(self, body: bytes) -> PolicyReport:
        """Put a policy in charge; raises ``RefusedError``, and nothing has changed then."""
        try:
            change = msgspec.json.decode(body or b"{}", type=PolicyChange)
            if change.kind == _SHADOW:
                self._watch(change)
                return self.report()
            if change.kind == SCHEDULE:
                self._schedule.use(strategy_of(change))
                return self.report()
            tier = self._tier_of(change)
            self._use(tier, PolicySpec(text=change.name, name=change.name, parameters=_numbers(change)))
        except UNREADABLE as error:
            self.refused += 1
            raise RefusedError(f"the body is not what is allowed: {error}") from error
        except (PolicyError, OverflowError) as error:
            self.refused += 1
            raise RefusedError(str(error)) from error
        except RefusedError:
            self.refused += 1
            raise
        return self.report()

    def _watch(self, change: PolicyChange) -> None:
        """Let these follow from now on; the same ones that follow already go on counting."""
        check_shadow(change)
        shadows = shadows_of(change.name, capacity_blocks=self._capacity(_HBM))
        if shadows.candidates != self._shadows.candidates:
            self._shadows = shadows
            self._engine.shadows = shadows if shadows.candidates else None

    def _use(self, tier: CacheTier, choice: PolicySpec) -> None:
        make: Callable[[], EvictionPolicy] = partial(
            make_policy, choice.name, capacity_blocks=self._capacity(tier), parameters=choice.parameters
        )
        make()  # is there such a policy?
        old = self._in_charge[tier]
        values = POLICIES[choice.name].values
        if old.choice.name == choice.name and values(old.choice.parameters) == values(choice.parameters):
            return
        found = self._found(tier)
        if tier is _HBM:
            self._engine.swap(make())
        elif self._engine.tiers is not None:
            self._engine.tiers.hierarchy.use_policy(tier, make)
        old.choice, old.found, old.began_s = choice, found, time.monotonic()
        old.swaps += 1

    def _tier_of(self, change: PolicyChange) -> CacheTier:
        kinds = {_kind_of(tier): tier for tier in self._tiers()}
        tier = kinds.get(change.kind)
        if tier is None:
            raise RefusedError(
                f"there are no policies of kind {change.kind!r}; this instance has {', '.join(kinds)}, {_SHADOW},"
                f" {SCHEDULE}"
            )
        if change.tier is None:
            return tier
        for each in kinds.values():
            if change.kind == _EVICTION and each.value.lower() == change.tier.lower():
                return each
        raise RefusedError(f"kind {change.kind!r} of tier {change.tier!r}: this instance has {', '.join(kinds)}")

    def _of(self, tier: CacheTier) -> PolicyInCharge:
        in_charge, engine = self._in_charge[tier], self._engine
        query, hit = self._found(tier)
        queried = None if query is None else query - (in_charge.found[0] or 0)
        hits = hit - in_charge.found[1]
        if tier is _HBM:
            resident, evicted = engine.pool.cached_blocks, engine.pool.evicted_blocks
        else:
            stats = self._below(tier)
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
        )
        choice = in_charge.choice
        return PolicyInCharge(
            kind=_kind_of(tier),
            name=choice.name,
            params=dict(choice.parameters),
            effective_params=dict(POLICIES[choice.name].values(choice.parameters)),
            eviction=report,
        )

    def _found(self, tier: CacheTier) -> tuple[int | None, int]:
        if tier is _HBM:
            return self._engine.counters.query_tokens, self._engine.counters.hit_tokens
        return None, sum(self._below(tier).hits.values())

    def _capacity(self, tier: CacheTier) -> int:
        return self._engine.pool.capacity_blocks if tier is _HBM else self._below(tier).capacity_blocks

    def _below(self, tier: CacheTier) -> TierStats:
        tiers = self._engine.tiers
        if tiers is None:
            raise RefusedError(f"this instance has no {tier} tier")
        return tiers.hierarchy.stats().tiers[tier]

    def _tiers(self) -> list[CacheTier]:
        tiers = self._engine.tiers
        return [_HBM, *(() if tiers is None else tiers.hierarchy.stats().tiers)]


def _numbers(change: PolicyChange) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in change.params.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RefusedError(f"params: {name} is {value!r}; policies take numbers")
        numbers[name] = float(value)
    return numbers


def _kind_of(tier: CacheTier) -> str:
    return _EVICTION if tier is _HBM else f"{_EVICTION}:{tier.value.lower()}"


__all__ = ["SimPolicies"]
