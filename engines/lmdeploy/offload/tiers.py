"""The tiers below one engine's KV pool, from start to end: built once the engine is, driven by its connector.

The pool is known when LMDeploy registers it, what its blocks are (``CacheIdentity``) only when the engine is complete;
``start`` joins both. Before that, and without tiers, every question is answered with "nothing".

Everything runs on the engine's loop thread, except ``stats`` of the hierarchy and the transfers themselves. Between
the engine's steps a timer of its loop follows what is under way, so that an idle engine's blocks reach NVMe too.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from engines.control.guard import Guard
from engines.events.log import EventLog
from engines.lmdeploy.offload.announcer import TierAnnouncer
from engines.lmdeploy.offload.memory import EngineMemory
from engines.lmdeploy.offload.plan import OffloadPlanner, SaveOrder
from engines.lmdeploy.offload.requests import OffloadRequests
from engines.lmdeploy.offload.save_health import SaveHealth
from engines.lmdeploy.offload.step_times import StepTimes
from engines.lmdeploy.offload.transfers import EngineTransfers
from engines.lmdeploy.trie.path import PathMaker
from kvcontrol.agent import KVAgent
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime import HierarchyManager, HostArena, Loss
from kvcontrol.prefetcher import Prefetcher


class Built(NamedTuple):
    """A hierarchy over an engine's memory; ``release`` closes what it stands on; no prefetcher, no guesses."""

    hierarchy: HierarchyManager
    arena: HostArena
    release: Callable[[], None]
    prefetcher: Prefetcher | None = None


BuildHierarchy = Callable[[EngineMemory, CacheIdentity], Built]


FOLLOW_EVERY_S = 0.05


class EngineTiers:
    """What both halves of the connector share: ``requests`` for its scheduler, ``transfers`` for its worker, and
    ``steps``, which measures. ``deadline_s`` bounds a load: later is a miss.
    """

    def __init__(self, *, pages_per_block: int, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.guard = Guard()
        self.saves = SaveHealth()
        self.memory: EngineMemory | None = None
        self.hierarchy: HierarchyManager | None = None
        self.arena: HostArena | None = None
        self.agent: KVAgent | None = None
        self.planner: OffloadPlanner | None = None
        self.announcer = TierAnnouncer(self.guard)
        self.steps = StepTimes(self.guard, clock)
        self._paths = PathMaker(self.guard)
        self.transfers = EngineTransfers(
            self.guard,
            self.saves,
            deadline_s=deadline_s,
            clock=clock,
            follow=self._announce,
            prepare=self._paths.work,
            lost=self._close_planner,
        )
        self.requests = OffloadRequests(self.guard, self._paths, self.transfers)
        self._pages_per_block = pages_per_block
        self._deadline_s = deadline_s
        self._release: Callable[[], None] | None = None
        self._scheduler: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def register(self, rows: Mapping[str, Any]) -> None:
        """Take the engine's pool, at the start and whenever it makes a new one."""
        if self.memory is None:
            self.memory = EngineMemory(rows, pages_per_block=self._pages_per_block)
        else:
            self.memory.register(rows)

    def unregister(self) -> None:
        """Let go of the pool: transfers under way end first, so that none touches freed memory."""
        if self.hierarchy is not None:
            self.guard("drain transfers", None, self.hierarchy.drain, self._deadline_s)
        if self.memory is not None:
            self.memory.unregister()

    def start(self, build: BuildHierarchy, identity: CacheIdentity, log: EventLog, scheduler: Any) -> None:
        """Begin to serve a complete engine; what an earlier life left behind is announced to ``log``."""
        if self.memory is None:
            raise RuntimeError("the engine has registered no KV pool with its connector")
        self._scheduler = scheduler
        self.hierarchy, self.arena, self._release, prefetcher = build(self.memory, identity)
        self.hierarchy.recover()
        self.agent = KVAgent(self.hierarchy, prefetcher=prefetcher)
        self.planner = OffloadPlanner(agent=self.agent, identity=identity, pin=self._pin, guard=self.guard)
        self.announcer.begin(log)
        self.transfers.begin(self.hierarchy, self.memory, self.agent)
        self.requests.begin(self.planner, scheduler)
        self._announce()

    def rebase(self, identity: CacheIdentity) -> None:
        """Other weights: nothing that was saved has a name any more."""
        if self.planner is not None:
            self.planner.rebase(identity)
        self.forget()

    def suspend(self) -> None:
        """Order no more loads and saves until ``resume``; what is under way ends as usual."""
        if self.planner is not None:
            self.planner.is_suspended = True

    def resume(self) -> None:
        if self.planner is not None:
            self.planner.is_suspended = False

    def have_settled(self) -> bool:
        """Follow transfers with the engine's memory, and return whether none is under way or waits to be ordered."""
        self.guard("follow transfers", None, self._announce)
        return self.transfers.is_idle and (self.planner is None or self.planner.is_idle)

    def forget(self, keys: Collection[BlockHash] | None = None) -> dict[CacheTier, int]:
        """Drop blocks below HBM, None for all, and return how many of each tier; transfers under way end as usual."""
        hierarchy = self.hierarchy
        if hierarchy is None:
            return {}
        before = self._dropped(hierarchy)
        hierarchy.drop(None if keys is None else [each for key in keys if (each := hierarchy.find(key)) is not None])
        self._announce()
        return {tier: blocks - before[tier] for tier, blocks in self._dropped(hierarchy).items()}

    @staticmethod
    def _dropped(hierarchy: HierarchyManager) -> dict[CacheTier, int]:
        return {tier: stats.losses.get(Loss.DROPPED, 0) for tier, stats in hierarchy.stats().tiers.items()}

    def announce_all(self) -> None:
        """Announce all that lies below HBM, after an event by which nothing was anywhere."""
        if self.hierarchy is not None:
            self._announce()
            self.announcer.announce_all(self.hierarchy)

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follow transfers from now on whenever the engine's loop is free, until ``close``."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed:
            self.guard("follow transfers", None, self._announce)
            self.guard("tell of the block trie", None, self.requests.settle_watchers)
            self._timer = loop.call_later(FOLLOW_EVERY_S, self.follow, loop)

    def drained(self) -> None:
        """LMDeploy sleeps: all transfers have ended, nobody asks for their outcome."""
        self.guard("follow transfers", None, self._announce)
        self.transfers.drained()
        self._paths.clear()
        self.steps.forget()
        if self.planner is not None:
            self.planner.reset()

    def step_ended(self) -> None:
        """The oldest step with orders has ended."""
        measured = self.steps.ended()
        if measured is not None and self.agent is not None:
            self.agent.costs.computed(*measured)

    def close(self) -> None:
        """End transfers, then files and memory; memory that a device still uses stays."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self.hierarchy is not None and self.hierarchy.close() and self._release is not None:
            self._release()

    def _announce(self) -> None:
        """Follow the hierarchy: tickets that ended, and what each tier gained and lost, which goes out as events."""
        hierarchy = self.hierarchy
        if hierarchy is None:
            return
        progress = hierarchy.poll()
        self.transfers.progressed(progress)
        if progress.changes:
            self.announcer.changed(progress.changes)
        if self.agent is not None and self.agent.prefetcher is not None:
            self.guard("prefetch", None, self.agent.prefetcher.work)

    def _close_planner(self) -> None:
        if self.planner is not None:
            self.planner.is_open = False

    def _pin(self, order: SaveOrder) -> None:
        """Lease the blocks of an ended request, as LMDeploy does for a step's saves."""
        from engines.lmdeploy.offload.connector import OffloadMetadata

        self._scheduler.kv_save_coordinator.acquire(OffloadMetadata((), (order,), ()))
