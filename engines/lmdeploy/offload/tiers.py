"""The tiers below one engine's KV pool, from start to end: built once the engine is, driven by its connector.

The pool is known when LMDeploy registers it, what its blocks are (``CacheIdentity``) only when the engine is complete;
``start`` joins both. Before that, and without tiers, every question is answered with "nothing".

Everything runs on the engine's loop thread, except ``stats`` of the hierarchy and the transfers themselves. Between
the engine's steps a timer of its loop follows what is under way, so that an idle engine's blocks reach NVMe too.

A transfer without an end long after its deadline means that the runtime itself has failed. Then the door to the
engine's memory is closed, all that is under way ends as failed, and the engine goes on without tiers.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from engines.events.log import EventLog
from engines.lmdeploy.guard import Guard
from engines.lmdeploy.offload.memory import EngineMemory
from engines.lmdeploy.offload.plan import LoadOrder, OffloadPlanner, SaveOrder
from engines.lmdeploy.offload.save_health import SaveHealth
from engines.lmdeploy.offload.transfers import Ended, UnderWay
from engines.lmdeploy.trie.events import tracker_of
from engines.lmdeploy.trie.path import PathMaker
from engines.lmdeploy.trie.watchers import watchers_of
from kvcontrol.agent import KVAgent
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime import BlockRecord, Change, HierarchyManager, HostArena, Loss, TicketId
from kvcontrol.prefetcher import Prefetcher


class Built(NamedTuple):
    """A hierarchy over an engine's memory; ``release`` closes what it stands on; no prefetcher, no guesses."""

    hierarchy: HierarchyManager
    arena: HostArena
    release: Callable[[], None]
    prefetcher: Prefetcher | None = None


BuildHierarchy = Callable[[EngineMemory, CacheIdentity], Built]


FOLLOW_EVERY_S = 0.05
SAVE_GRACE_S = 0.01
"""How long a save waits after the forward that wrote its blocks: the forward's token takes the same way to the host."""
PUT_OFF_START_S = 0.05
"""For how long nobody is told what was evicted to make room for a load: until it has begun."""
PUT_OFF_FORWARD_S = 0.15
"""For how long nobody is told of the blocks that a load brought: until their prompt's forward has been launched."""
GRACE_S = 5.0
"""A transfer that has not ended so long after twice its deadline never will."""

_log = logging.getLogger(__name__)


class ChangeWitness(Protocol):
    """Whoever must act on what tiers gain and lose. Never raises."""

    def changed_below(self, changes: Sequence[Change]) -> None:
        """Follow changes, in their order."""


class EngineTiers:
    """What both halves of the connector share. ``deadline_s`` bounds a load: later is a miss."""

    def __init__(self, *, pages_per_block: int, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.guard = Guard()
        self.saves = SaveHealth()
        self.memory: EngineMemory | None = None
        self.hierarchy: HierarchyManager | None = None
        self.arena: HostArena | None = None
        self.agent: KVAgent | None = None
        self.planner: OffloadPlanner | None = None
        self.witness: ChangeWitness | None = None
        self._pages_per_block = pages_per_block
        self._deadline_s = deadline_s
        self._clock = clock
        self._release: Callable[[], None] | None = None
        self._log: EventLog | None = None
        self._scheduler: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._loads: dict[int, LoadOrder] = {}
        self._paths = PathMaker(self.guard)
        self._load_tickets: dict[TicketId, UnderWay[LoadOrder]] = {}
        self._save_tickets: dict[TicketId, UnderWay[SaveOrder]] = {}
        self._usable: set[TicketId] = set()
        """Loads that the engine uses already, in its device's order, though they have not ended."""
        self._must_join = False
        self._load_told = False
        self._ended = Ended()
        self._steps: deque[tuple[int, float]] = deque()
        self._step_ended_s = -math.inf

    # Life.

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
        self._log, self._scheduler = log, scheduler
        self.hierarchy, self.arena, self._release, prefetcher = build(self.memory, identity)
        self.hierarchy.recover()
        self.agent = KVAgent(self.hierarchy, prefetcher=prefetcher)
        self.planner = OffloadPlanner(agent=self.agent, identity=identity, pin=self._pin, guard=self.guard)
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
        under_way = self._load_tickets or self._save_tickets or self._has_ended
        return not under_way and (self.planner is None or self.planner.is_idle)

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

    def tell_anew(self) -> None:
        """Announce all that lies below HBM, after an event that said that nothing is anywhere."""
        hierarchy, log = self.hierarchy, self._log
        if hierarchy is None or log is None:
            return
        self._announce()
        for block_id, record in hierarchy.blocks():
            for tier in hierarchy.locate(block_id):
                log.stored(record.key, parent=record.parent, tokens=record.tokens, tier=tier)

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follow transfers from now on whenever the engine's loop is free, until ``close``."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._closed:
            self.guard("follow transfers", None, self._announce)
            self.guard("tell of the block trie", None, self._tell_watchers)
            self._timer = loop.call_later(FOLLOW_EVERY_S, self.follow, loop)

    def close(self) -> None:
        """End transfers, then files and memory; memory that a device still uses stays."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self.hierarchy is not None and self.hierarchy.close() and self._release is not None:
            self._release()

    # What the connector's scheduler half asks.

    def arrived(self, seq: Any) -> None:
        if self.planner is not None:
            self.planner.arrived(seq)

    def external_tokens(self, seq: Any, computed_tokens: int) -> int | None:
        tokens = 0 if self.planner is None else self.planner.external_tokens(seq, computed_tokens)
        if tokens and (tracker := tracker_of(self._scheduler.block_trie)) is not None:
            tracker.put_off_telling(PUT_OFF_START_S)
        return tokens

    def lookup_cancelled(self, request_id: int) -> None:
        """A request is over before its blocks have come from elsewhere."""
        if self.planner is not None and self.planner.supply is not None:
            self.planner.supply.forget(request_id)

    def allocated(self, seq: Any, slots: Sequence[int]) -> None:
        """Never raises: LMDeploy has taken the blocks already. A load that can't be ordered is one that failed."""
        planner = self.planner
        last_block = 0 if planner is None else self.guard("bind a load", 0, planner.allocated, seq, slots)
        if last_block:
            self.guard("begin a path", None, lambda: self._paths.begin(self._scheduler.block_trie, seq, last_block))
        else:
            self._ended.loads.add(int(seq.seq_id))
            self._ended.invalid_slots.update(map(int, slots))

    def ended(self, seq: Any) -> None:
        """A request is over, its blocks are still its own for the length of this call."""
        if self.planner is None:
            return
        slots: Sequence[int] = ()
        logical: Sequence[int] = ()
        if seq.num_blocks > 0:
            slots = self._scheduler.block_manager.get_block_table(seq)
            logical = seq.logical_blocks.get_real_blocks()
        self.planner.ended(seq, slots, logical)

    def step_ordered(self, running: Sequence[Any], token_lens: Sequence[int]) -> None:
        """A step with orders begins, in which so many prompt tokens are computed (``token_lens`` empty: none)."""
        ends = zip(running, token_lens, strict=False)
        tokens = self.guard(
            "count prompt tokens", 0, lambda: sum(int(end) - int(seq.num_history_ids) for seq, end in ends)
        )
        self._steps.append((tokens, self._clock()))

    def step_ended(self) -> None:
        """The oldest step with orders has ended. The next may have been ordered, but not begun, before that."""
        if not self._steps:
            return
        tokens, ordered_s = self._steps.popleft()
        began_s, self._step_ended_s = max(ordered_s, self._step_ended_s), self._clock()
        if self.agent is not None:
            self.agent.costs.computed(tokens, self._step_ended_s - began_s)

    def loads_ended(self, request_ids: Iterable[int], invalid_slots: Iterable[int]) -> list[tuple[int, bool]]:
        """Return each load's end and whether it succeeded."""
        invalid = set(invalid_slots)
        if request_ids := sorted(request_ids):
            self.guard("put off telling", None, self._put_off_watchers)
        return [(request_id, self._load_usable(request_id, invalid)) for request_id in request_ids]

    def _tell_watchers(self) -> None:
        """Let those who watch the block trie be told what waits for it."""
        for watcher in watchers_of(self._scheduler.block_trie):
            watcher.settle()

    def _put_off_watchers(self) -> None:
        """Have them told of what a load brought after its prompt's forward has been launched."""
        for watcher in watchers_of(self._scheduler.block_trie):
            watcher.put_off_telling(PUT_OFF_FORWARD_S)

    def _load_usable(self, request_id: int, invalid: set[int]) -> bool:
        self._paths.end(request_id)
        order = self._loads.pop(request_id, None)
        success = order is not None and (not invalid or invalid.isdisjoint(order.slots))
        planner = self.planner
        if planner is None:
            return False
        return self.guard("note a load's end", False, lambda: planner.loaded(request_id, success=success))  # noqa: FBT003

    def saves_ended(self, save_ids: Iterable[int]) -> frozenset[int]:
        """Return the saves whose blocks LMDeploy may let go."""
        planner = self.planner
        return frozenset() if planner is None else frozenset(each for each in save_ids if planner.saved(each))

    def drained(self) -> None:
        """LMDeploy sleeps: all transfers have ended, nobody asks for their outcome."""
        self.guard("follow transfers", None, self._announce)
        for ticket, under_way in list(self._load_tickets.items()):
            self._load_ended(ticket, under_way.order, range(len(under_way.order.slots)))
        self._loads.clear()
        self._paths.clear()
        self._load_tickets.clear()
        self._save_tickets.clear()
        self._usable.clear()
        self._must_join = False
        self._ended = Ended()
        self._steps.clear()
        if self.planner is not None:
            self.planner.reset()

    # What the connector's worker half asks.

    @property
    def is_busy(self) -> bool:
        """Whether ended transfers wait to be collected, or to be joined."""
        return self._has_ended or self._must_join

    def join(self) -> None:
        """Let the forward or the save that comes next find what loads that count as ended still bring.

        Not before it must be: what the engine queues from here on waits for the loads, answers to other requests too.
        """
        if self._must_join and self.memory is not None:
            self._must_join = False
            self.memory.join()

    @property
    def _has_ended(self) -> bool:
        return bool(self._ended.loads or self._ended.saves)

    def start_loads(self, orders: Sequence[LoadOrder]) -> None:
        """Start loads, each behind all that the engine has queued; one that can't start has failed."""
        for order in orders:
            self._loads[order.request_id] = order
            if not self.guard("start a load", False, self._start_load, order):  # noqa: FBT003
                self._load_ended(None, order, range(len(order.slots)))

    def _start_load(self, order: LoadOrder) -> bool:
        if self.hierarchy is None or self.memory is None:
            return False
        ticket = self.hierarchy.load(
            order.plan.block_ids,
            order.slots,
            fence=self.memory.fence(),
            deadline_s=self._deadline_s,
            expected_s=order.plan.expected_s,
        )
        self._load_tickets[ticket] = UnderWay(order, self._lost_at_s())
        return True

    def start_saves(self, orders: Sequence[SaveOrder]) -> None:
        """Start saves, behind all that the engine has queued; one that can't start has ended."""
        for order in orders:
            if not self.guard("start a save", False, self._start_save, order):  # noqa: FBT003
                self._ended.saves.add(order.save_id)
                self.saves.raised(self.guard.last_error)

    def _start_save(self, order: SaveOrder) -> bool:
        if self.hierarchy is None or self.memory is None:
            return False
        self.join()  # a block to save may be one whose load is still under way
        ticket = self.hierarchy.save(
            order.requests,
            heads_held=order.plan.heads_held,
            fence=self.memory.fence(grace_s=SAVE_GRACE_S),
            deadline_s=self._deadline_s,
        )
        self._save_tickets[ticket.ticket_id] = UnderWay(order, self._lost_at_s())
        return True

    def collect(self, wait_s: float) -> Ended:
        """Return what ended since the last call, waiting at most ``wait_s`` for something to.

        A load counts as ended when its blocks are verified and the device will do nothing that the engine asks of it
        from now on before they have come: the host prepares the forward meanwhile.
        """
        # LMDeploy orders a step ahead: the one after a load's end has nothing to do, and a prompt waits for it.
        if not self._load_told:
            self.guard("follow transfers", None, self._announce)
            if wait_s > 0 and not self._has_ended:
                self.guard("wait for transfers", None, self._wait, wait_s)
            self._give_up_lost()
        ended, self._ended = self._ended, Ended()
        self._load_told = bool(ended.loads)
        return ended

    def _wait(self, wait_s: float) -> None:
        """Prepare what comes after the transfers, then let them have the GIL, until one that is waited for has ended;
        the loop has nothing else to do.
        """
        hierarchy = self.hierarchy
        until_s = time.monotonic() + wait_s
        while not self._has_ended and (left_s := until_s - time.monotonic()) > 0:
            if self._paths.work():
                self._announce()
            elif hierarchy is None:
                time.sleep(left_s)
            elif hierarchy.wait(left_s):
                self._announce()

    def _announce(self) -> None:
        """Follow the hierarchy: tickets that ended, and what each tier gained and lost, which goes out as events."""
        hierarchy = self.hierarchy
        if hierarchy is None:
            return
        progress = hierarchy.poll()
        for ticket in progress.queued:
            if (load := self._load_tickets.get(ticket)) is not None:
                self._usable.add(ticket)
                self._must_join = True
                self._ended.loads.add(load.order.request_id)
        for end in progress.finished:
            if (load := self._load_tickets.pop(end.ticket_id, None)) is not None:
                self._load_ended(end.ticket_id, load.order, end.failed)
            elif (save := self._save_tickets.pop(end.ticket_id, None)) is not None:
                self._ended.saves.add(save.order.save_id)
                self.saves.ended(end)
        if progress.changes:
            self._changed(progress.changes)
        if self.agent is not None and self.agent.prefetcher is not None:
            self.guard("prefetch", None, self.agent.prefetcher.work)

    def _changed(self, changes: Sequence[Change]) -> None:
        for (tier, gained), run in groupby(changes, key=lambda change: (change.tier, change.gained)):
            self.guard("announce blocks", None, self._tell, tier, gained, [change.record for change in run])
        if self.witness is not None:
            self.witness.changed_below(changes)

    def _tell(self, tier: CacheTier, gained: bool, records: Sequence[BlockRecord]) -> None:  # noqa: FBT001
        log = self._log
        if log is None:
            return
        if gained:
            log.stored_all([(record.key, record.parent, record.tokens) for record in records], tier=tier)
        else:
            log.removed_all([record.key for record in records], tier=tier)

    def _load_ended(self, ticket: TicketId | None, order: LoadOrder, failed: Sequence[int]) -> None:
        """Note a load's end; ``failed`` are the places of blocks whose slots hold nothing of use."""
        if ticket in self._usable:
            self._usable.discard(ticket)
            if failed:  # verified and queued, and then not done: the device is broken, and the engine will find out too
                self.guard.errors += 1
                _log.error("a load of %d blocks broke off on the device while the engine used it", len(order.slots))
        else:
            self._ended.loads.add(order.request_id)
            self._ended.invalid_slots.update([order.slots[place] for place in failed])
        if self.agent is not None:
            self.guard("release a load", None, self.agent.release, order.plan)

    def _lost_at_s(self) -> float:
        return self._clock() + 2 * self._deadline_s + GRACE_S

    def _give_up_lost(self) -> None:
        """Do without tiers when a transfer that should have ended long ago has not; O(1) otherwise."""
        times = [next((each.lost_at_s for each in self._load_tickets.values()), math.inf)]
        times.append(next((each.lost_at_s for each in self._save_tickets.values()), math.inf))
        if min(times) > self._clock():
            return
        self.guard.errors += 1
        _log.error("a block transfer has no end: the engine goes on without KV tiers until it is started again")
        if self.planner is not None:
            self.planner.is_open = False
        if self.memory is None or not self.memory.unregister():
            return  # its slots may still be written: they can't be given back yet
        for ticket, load in list(self._load_tickets.items()):
            self._load_ended(ticket, load.order, range(len(load.order.slots)))
        self._ended.saves.update(save.order.save_id for save in self._save_tickets.values())
        self._load_tickets.clear()
        self._save_tickets.clear()

    def _pin(self, order: SaveOrder) -> None:
        """Lease the blocks of an ended request, as LMDeploy does for a step's saves."""
        from engines.lmdeploy.offload.connector import OffloadMetadata

        self._scheduler.kv_save_coordinator.acquire(OffloadMetadata((), (order,), ()))


__all__ = ["BuildHierarchy", "Built", "ChangeWitness", "EngineTiers"]
