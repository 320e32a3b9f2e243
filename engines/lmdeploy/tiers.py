"""The tiers below one engine's KV pool, from start to end: built once the engine is, driven by its connector.

The pool is known when LMDeploy registers it, what its blocks are (``CacheIdentity``) only when the engine is complete;
``start`` joins both. Before that, and without tiers, every question is answered with "nothing".

Everything runs on the engine's loop thread, except ``stats`` of the hierarchy and the transfers themselves.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engines.event_log import EventLog
from engines.lmdeploy.guard import Guard
from engines.lmdeploy.memory import EngineMemory
from engines.lmdeploy.offload_plan import LoadOrder, OffloadPlanner, SaveOrder
from kvcontrol.agent import KVAgent
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.kv_runtime import BlockStatus, HierarchyManager, TicketId


class Built(NamedTuple):
    """A hierarchy over an engine's memory; ``release`` closes what it stands on."""

    hierarchy: HierarchyManager
    release: Callable[[], None]


BuildHierarchy = Callable[[EngineMemory, CacheIdentity], Built]


@dataclass(slots=True)
class Ended:
    """Transfers that ended: request ids of loads, operation ids of saves, and slots that a load could not fill."""

    loads: set[int] = field(default_factory=set)
    saves: set[int] = field(default_factory=set)
    invalid_slots: set[int] = field(default_factory=set)


class EngineTiers:
    """What both halves of the connector share. ``deadline_s`` bounds a load: later is a miss."""

    def __init__(self, *, pages_per_block: int, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.guard = Guard()
        self.memory: EngineMemory | None = None
        self.hierarchy: HierarchyManager | None = None
        self.agent: KVAgent | None = None
        self.planner: OffloadPlanner | None = None
        self._pages_per_block = pages_per_block
        self._deadline_s = deadline_s
        self._clock = clock
        self._release: Callable[[], None] | None = None
        self._log: EventLog | None = None
        self._scheduler: Any = None
        self._loads: dict[int, LoadOrder] = {}
        self._load_tickets: dict[TicketId, LoadOrder] = {}
        self._save_tickets: dict[TicketId, SaveOrder] = {}
        self._ended = Ended()
        self._prefill: tuple[int, float] | None = None

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
            self.hierarchy.drain(self._deadline_s)
        if self.memory is not None:
            self.memory.unregister()

    def start(self, build: BuildHierarchy, identity: CacheIdentity, log: EventLog, scheduler: Any) -> None:
        """Begin to serve a complete engine; what an earlier life left behind is announced to ``log``."""
        if self.memory is None:
            raise RuntimeError("the engine has registered no KV pool with its connector")
        self._log, self._scheduler = log, scheduler
        self.hierarchy, self._release = build(self.memory, identity)
        self.hierarchy.recover()
        self.agent = KVAgent(self.hierarchy)
        self.planner = OffloadPlanner(agent=self.agent, identity=identity, pin=self._pin, guard=self.guard)
        self._announce()

    def rebase(self, identity: CacheIdentity) -> None:
        """Other weights: nothing that was saved has a name any more."""
        if self.planner is not None:
            self.planner.rebase(identity)
        self.forget()

    def forget(self) -> dict[CacheTier, int]:
        """Drop all that lies below HBM, and return how many blocks of each tier; transfers under way end as usual."""
        if self.hierarchy is None:
            return {}
        held = {tier: stats.used_blocks + stats.held_blocks for tier, stats in self.hierarchy.stats().tiers.items()}
        self.hierarchy.drop()
        self._announce()
        return held

    def close(self) -> None:
        """End transfers, then files and memory; memory that a device still uses stays."""
        if self.hierarchy is not None and self.hierarchy.close() and self._release is not None:
            self._release()

    # What the connector's scheduler half asks.

    def arrived(self, seq: Any) -> None:
        if self.planner is not None:
            self.planner.arrived(seq)

    def external_tokens(self, seq: Any, computed_tokens: int) -> int:
        return 0 if self.planner is None else self.planner.external_tokens(seq, computed_tokens)

    def allocated(self, seq: Any, slots: Sequence[int]) -> None:
        """Never raises: LMDeploy has taken the blocks already. A load that can't be ordered is one that failed."""
        planner = self.planner
        if planner is None or not self.guard("bind a load", False, planner.allocated, seq, slots):  # noqa: FBT003
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

    def note_prefill(self, running: Sequence[Any], token_lens: Sequence[int]) -> None:
        """A step with prefill was ordered: until its output returns, that is what computing its tokens costs."""
        if token_lens:
            tokens = sum(int(end) - int(seq.num_history_ids) for seq, end in zip(running, token_lens, strict=False))
            self._prefill = (tokens, self._clock())

    def loads_ended(self, request_ids: Iterable[int], invalid_slots: Iterable[int]) -> list[tuple[int, bool]]:
        """Return each load's end and whether it succeeded."""
        self._measure_prefill()
        invalid = set(invalid_slots)
        ended = []
        for request_id in sorted(request_ids):
            order = self._loads.pop(request_id, None)
            success = order is not None and invalid.isdisjoint(order.slots)
            if self.planner is not None:
                self.planner.loaded(request_id, success=success)
            ended.append((request_id, success))
        return ended

    def saves_ended(self, save_ids: Iterable[int]) -> frozenset[int]:
        """Return the saves whose blocks LMDeploy may let go."""
        planner = self.planner
        return frozenset() if planner is None else frozenset(each for each in save_ids if planner.saved(each))

    def drained(self) -> None:
        """LMDeploy sleeps: all transfers have ended, nobody asks for their outcome."""
        self._loads.clear()
        self._load_tickets.clear()
        self._save_tickets.clear()
        self._ended = Ended()
        self._prefill = None
        if self.planner is not None:
            self.planner.reset()

    # What the connector's worker half asks.

    @property
    def is_busy(self) -> bool:
        """Whether ended transfers wait to be collected."""
        return bool(self._ended.loads or self._ended.saves)

    def start_loads(self, orders: Sequence[LoadOrder]) -> None:
        """Start loads, each behind all that the engine has queued; one that can't start has failed."""
        for order in orders:
            self._loads[order.request_id] = order
            if not self.guard("start a load", False, self._start_load, order):  # noqa: FBT003
                self._load_ended(order, [BlockStatus.FAILED] * len(order.slots))

    def _start_load(self, order: LoadOrder) -> bool:
        if self.hierarchy is None or self.memory is None:
            return False
        ticket = self.hierarchy.load(
            order.plan.block_ids, order.slots, fence=self.memory.fence(), deadline_s=self._deadline_s
        )
        self._load_tickets[ticket] = order
        return True

    def start_saves(self, orders: Sequence[SaveOrder]) -> None:
        """Start saves, behind all that the engine has queued; one that can't start has ended."""
        for order in orders:
            if not self.guard("start a save", False, self._start_save, order):  # noqa: FBT003
                self._ended.saves.add(order.save_id)

    def _start_save(self, order: SaveOrder) -> bool:
        if self.hierarchy is None or self.memory is None:
            return False
        ticket = self.hierarchy.save(order.requests, fence=self.memory.fence(), deadline_s=self._deadline_s)
        self._save_tickets[ticket.ticket_id] = order
        return True

    def collect(self, wait_s: float) -> Ended:
        """Return what ended since the last call, waiting at most ``wait_s`` for something to."""
        self._announce()
        if wait_s > 0 and not self.is_busy:
            time.sleep(wait_s)  # lets the transfers have the GIL; the loop has nothing else to do
            self._announce()
        ended, self._ended = self._ended, Ended()
        return ended

    def _announce(self) -> None:
        """Follow the hierarchy: tickets that ended, and what each tier gained and lost, which goes out as events."""
        hierarchy, log = self.hierarchy, self._log
        if hierarchy is None or log is None:
            return
        progress = hierarchy.poll()
        for change in progress.changes:
            key = change.record.key
            if change.gained:
                log.stored(key, parent=change.record.parent, tokens=change.record.tokens, tier=change.tier)
            else:
                log.removed(key, tier=change.tier)
        for end in progress.finished:
            if (load := self._load_tickets.pop(end.ticket_id, None)) is not None:
                self._load_ended(load, [outcome.status for outcome in end.outcomes])
            elif (save := self._save_tickets.pop(end.ticket_id, None)) is not None:
                self._ended.saves.add(save.save_id)

    def _load_ended(self, order: LoadOrder, statuses: Sequence[BlockStatus]) -> None:
        if self.agent is not None:
            self.agent.release(order.plan)
        self._ended.loads.add(order.request_id)
        self._ended.invalid_slots.update(
            slot for slot, status in zip(order.slots, statuses, strict=True) if status is not BlockStatus.OK
        )

    def _measure_prefill(self) -> None:
        if self._prefill is not None and self.agent is not None:
            tokens, started_s = self._prefill
            self._prefill = None
            self.agent.prefill.measured(tokens, self._clock() - started_s)

    def _pin(self, order: SaveOrder) -> None:
        """Lease the blocks of an ended request, as LMDeploy does for a step's saves."""
        from engines.lmdeploy.connector import OffloadMetadata

        self._scheduler.kv_save_coordinator.acquire(OffloadMetadata((), (order,), ()))


__all__ = ["BuildHierarchy", "Built", "Ended", "EngineTiers"]
