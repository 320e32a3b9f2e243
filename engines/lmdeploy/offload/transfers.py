"""Loads and saves of one engine that are under way, from their orders to what LMDeploy is told of their ends.

A transfer without an end long after its deadline means that the runtime itself has failed. Then the engine's memory is
unregistered, all that is under way ends as failed, and the engine goes on without tiers.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from engines.control.guard import Guard
from engines.lmdeploy.offload.memory import EngineMemory
from engines.lmdeploy.offload.plan import LoadOrder, SaveOrder
from engines.lmdeploy.offload.save_health import SaveHealth
from kvcontrol.agent import KVAgent
from kvcontrol.kv_runtime import HierarchyManager, TicketId
from kvcontrol.kv_runtime.ticket import Progress

SAVE_GRACE_S: Final = 0.01
"""How long a save waits after the forward that wrote its blocks: the forward's token takes the same way to the host."""
GRACE_S: Final = 5.0
"""A transfer that has not ended so long after twice its deadline never will."""

_log = logging.getLogger(__name__)
_Order = TypeVar("_Order")


@dataclass(slots=True)
class Ended:
    """Transfers that ended: request ids of loads, operation ids of saves, and slots that a load could not fill."""

    loads: set[int] = field(default_factory=set)
    saves: set[int] = field(default_factory=set)
    invalid_slots: set[int] = field(default_factory=set)


class UnderWay(NamedTuple, Generic[_Order]):
    """A transfer that was started, and when it is given up for lost."""

    order: _Order
    lost_at_s: float


class EngineTransfers:
    """One engine's transfers, on its thread. ``deadline_s`` bounds a load: later is a miss.

    ``follow`` polls the hierarchy and calls ``progressed``; ``prepare`` does a slice of what comes after the loads, and
    returns whether there was one; ``lost`` lets the engine go on without tiers.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        guard: Guard,
        saves: SaveHealth,
        *,
        deadline_s: float,
        clock: Callable[[], float],
        follow: Callable[[], None],
        prepare: Callable[[], bool],
        lost: Callable[[], None],
    ) -> None:
        self._guard = guard
        self._saves = saves
        self._deadline_s = deadline_s
        self._clock = clock
        self._follow = follow
        self._prepare = prepare
        self._lost = lost
        self._hierarchy: HierarchyManager | None = None
        self._memory: EngineMemory | None = None
        self._agent: KVAgent | None = None
        self._orders: dict[int, LoadOrder] = {}
        self._load_tickets: dict[TicketId, UnderWay[LoadOrder]] = {}
        self._save_tickets: dict[TicketId, UnderWay[SaveOrder]] = {}
        self._usable: set[TicketId] = set()
        """Loads that the engine uses already, in its device's order, though they have not ended."""
        self._must_join = False
        self._load_reported = False
        self._ended = Ended()

    def begin(self, hierarchy: HierarchyManager, memory: EngineMemory, agent: KVAgent) -> None:
        """Move blocks between these from now on."""
        self._hierarchy, self._memory, self._agent = hierarchy, memory, agent

    @property
    def is_busy(self) -> bool:
        """Whether ended transfers wait to be collected, or to be joined."""
        return self._has_ended or self._must_join

    @property
    def is_idle(self) -> bool:
        """Whether none is under way or waits to be collected."""
        return not (self._load_tickets or self._save_tickets or self._has_ended)

    def join(self) -> None:
        """Let the next forward or save wait for loads that count as ended and are still in flight.

        Not before it must be: what the engine queues from here on waits for the loads, answers to other requests too.
        """
        if self._must_join and self._memory is not None:
            self._must_join = False
            self._memory.join()

    def start_loads(self, orders: Sequence[LoadOrder]) -> None:
        """Start loads, each behind all that the engine has queued; one that can't start has failed."""
        for order in orders:
            self._orders[order.request_id] = order
            if not self._guard("start a load", False, self._start_load, order):  # noqa: FBT003
                self._load_ended(None, order, range(len(order.slots)))

    def start_saves(self, orders: Sequence[SaveOrder]) -> None:
        """Start saves, behind all that the engine has queued; one that can't start has ended."""
        for order in orders:
            if not self._guard("start a save", False, self._start_save, order):  # noqa: FBT003
                self._ended.saves.add(order.save_id)
                self._saves.raised(self._guard.last_error)

    def failed(self, request_id: int, slots: Iterable[int]) -> None:
        """Count a load that could not be ordered as one that failed."""
        self._ended.loads.add(request_id)
        self._ended.invalid_slots.update(slots)

    def take_order(self, request_id: int) -> LoadOrder | None:
        """Forget a request's load, and return its order; None where there was none."""
        return self._orders.pop(request_id, None)

    def collect(self, wait_s: float) -> Ended:
        """Return the transfers that ended since the last call, waiting at most ``wait_s`` for one.

        A load counts as ended when its blocks are verified and the device will do nothing that the engine asks of it
        from now on before they have come: the host prepares the forward meanwhile.
        """
        # LMDeploy orders a step ahead: the one after a load's end has nothing to do, and a prompt waits for it.
        if not self._load_reported:
            self._guard("follow transfers", None, self._follow)
            if wait_s > 0 and not self._has_ended:
                self._guard("wait for transfers", None, self._wait, wait_s)
            self._give_up_lost()
        ended, self._ended = self._ended, Ended()
        self._load_reported = bool(ended.loads)
        return ended

    def progressed(self, progress: Progress) -> None:
        """Follow tickets that were queued and that ended."""
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
                self._saves.ended(end)

    def drained(self) -> None:
        """Forget all transfers: LMDeploy sleeps, all have ended, and their outcomes are unused."""
        for ticket, under_way in list(self._load_tickets.items()):
            self._load_ended(ticket, under_way.order, range(len(under_way.order.slots)))
        self._orders.clear()
        self._load_tickets.clear()
        self._save_tickets.clear()
        self._usable.clear()
        self._must_join = False
        self._ended = Ended()

    @property
    def _has_ended(self) -> bool:
        return bool(self._ended.loads or self._ended.saves)

    def _start_load(self, order: LoadOrder) -> bool:
        if self._hierarchy is None or self._memory is None:
            return False
        ticket = self._hierarchy.load(
            order.plan.block_ids,
            order.slots,
            fence=self._memory.fence(),
            deadline_s=self._deadline_s,
            expected_s=order.plan.expected_s,
        )
        self._load_tickets[ticket] = UnderWay(order, self._lost_at_s())
        return True

    def _start_save(self, order: SaveOrder) -> bool:
        if self._hierarchy is None or self._memory is None:
            return False
        self.join()  # a block to save may be one whose load is still under way
        ticket = self._hierarchy.save(
            order.requests,
            heads_held=order.plan.heads_held,
            fence=self._memory.fence(grace_s=SAVE_GRACE_S),
            deadline_s=self._deadline_s,
        )
        self._save_tickets[ticket.ticket_id] = UnderWay(order, self._lost_at_s())
        return True

    def _wait(self, wait_s: float) -> None:
        """Prepare what comes after the transfers, then let them have the GIL, until one that is waited for has ended;
        the loop has nothing else to do.
        """
        hierarchy = self._hierarchy
        until_s = time.monotonic() + wait_s
        while not self._has_ended and (left_s := until_s - time.monotonic()) > 0:
            if self._prepare():
                self._follow()
            elif hierarchy is None:
                time.sleep(left_s)
            elif hierarchy.wait(left_s):
                self._follow()

    def _load_ended(self, ticket: TicketId | None, order: LoadOrder, failed: Sequence[int]) -> None:
        """Record a load's end; ``failed`` are the places of blocks whose slots are unusable."""
        if ticket in self._usable:
            self._usable.discard(ticket)
            if failed:  # verified and queued, and then not done: the device is broken, and the engine will find out too
                self._guard.errors += 1
                _log.error("a load of %d blocks broke off on the device while the engine used it", len(order.slots))
        else:
            self.failed(order.request_id, [order.slots[place] for place in failed])
        if self._agent is not None:
            self._guard("release a load", None, self._agent.release, order.plan)

    def _lost_at_s(self) -> float:
        return self._clock() + 2 * self._deadline_s + GRACE_S

    def _give_up_lost(self) -> None:
        """Do without tiers when a transfer that should have ended long ago has not; O(1) otherwise."""
        times = [next((each.lost_at_s for each in self._load_tickets.values()), math.inf)]
        times.append(next((each.lost_at_s for each in self._save_tickets.values()), math.inf))
        if min(times) > self._clock():
            return
        self._guard.errors += 1
        _log.error("a block transfer does not end: the engine continues without KV tiers until a restart")
        self._lost()
        if self._memory is None or not self._memory.unregister():
            return  # its slots may still be written: they can't be given back yet
        for ticket, load in list(self._load_tickets.items()):
            self._load_ended(ticket, load.order, range(len(load.order.slots)))
        self._ended.saves.update(save.order.save_id for save in self._save_tickets.values())
        self._load_tickets.clear()
        self._save_tickets.clear()
