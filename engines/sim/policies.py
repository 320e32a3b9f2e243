"""What a simulated engine implements for policy control: its pool, its waiting queue, and time for shadows."""

from typing import Final

from engines.control.calls import call_at_once
from engines.control.eviction import EvictionControl, EvictionCounts, MakePolicy
from engines.control.policies import PolicyControl
from engines.control.schedule import ScheduleControl
from engines.control.shadows import ShadowTimer
from engines.sim.engine import SimEngine
from engines.sim.waiting import FIFO
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.policy_control import ScheduleReport
from kvcontrol.kv_policy import EvictionPolicy, ShadowPolicies
from kvcontrol.kv_policy.spec import PolicySpec
from kvcontrol.scheduler_ir.strategies import DEFAULT_STRATEGY, WaitingQueue


class PoolCache:
    """A simulated engine's pool as policy control sees it: see ``EngineCache``."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._next: EvictionPolicy | None = None

    @property
    def capacity_blocks(self) -> int:
        return self._engine.pool.capacity_blocks

    @property
    def policy_name(self) -> str:
        return self.policy.name

    @property
    def policy(self) -> EvictionPolicy:
        return self._engine.pool.policy

    def counts(self) -> EvictionCounts:
        pool, counters = self._engine.pool, self._engine.counters
        return EvictionCounts(
            resident_blocks=len(pool.cached),
            evicted_blocks=pool.evicted_blocks,
            query=counters.query_tokens,
            hit=counters.hit_tokens,
        )

    @property
    def is_swapping(self) -> bool:
        return self._next is not None

    def begin_swap(self, make: MakePolicy) -> None:
        self._next = make()

    def continue_swap(self, blocks: int) -> int:
        """A simulated engine waits for nobody: ``end_swap`` does all at once."""
        del blocks
        return 0

    def end_swap(self) -> None:
        policy, self._next = self._next, None
        if policy is not None:
            self._engine.pool.swap(policy)

    @property
    def shadows(self) -> ShadowPolicies | None:
        return self._engine.blocks.shadows

    def watch(self, shadows: ShadowPolicies) -> None:
        self._engine.blocks.shadows = shadows if shadows.candidates else None


class SimQueue:
    """A simulated engine's waiting queue as policy control sees it: see ``StrategyQueue``."""

    failed: Final = False

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine

    @property
    def strategy(self) -> str:
        return self._engine.queue.strategy

    def swap(self, queue: WaitingQueue) -> None:
        self._engine.queue.swap(queue)

    def report(self, *, swaps: int, in_charge_s: float) -> ScheduleReport:
        return self._engine.queue.report(self._engine.now_s, swaps=swaps, in_charge_s=in_charge_s)


class SimPolicies(PolicyControl):
    """The policy control of one simulated engine, on its thread. Its steps follow no pace."""

    def __init__(self, engine: SimEngine) -> None:
        cache, queue, shape = PoolCache(engine), SimQueue(engine), engine.profile.engine
        eviction = EvictionControl(
            cache,
            lambda: None if engine.tiers is None else engine.tiers.hierarchy,
            call_at_once,
            first_policy=lambda tier: shape.policy if tier is CacheTier.HBM else shape.tier_policy,
        )
        schedule = ScheduleControl(lambda: queue, first=FIFO)
        schedule.swap(PolicySpec(text=DEFAULT_STRATEGY, name=DEFAULT_STRATEGY, parameters={}), counts=False)
        super().__init__(cache, eviction, call_at_once, (schedule,))
        self.shadow_timer = ShadowTimer(lambda: engine.blocks.shadows is not None and engine.blocks.shadows.work())
