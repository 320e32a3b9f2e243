"""Loads and prefetches: the path of each block to its tier, and what happens if a lane or slot is busy.

A block in DDR goes straight to the engine. A block in NVMe needs a slot in DDR first; when not all of a load's blocks
get one, the rest waits until those before it are through and can make way, so that a load may be larger than DDR. A
block that another ticket is already bringing up is waited for, and what brings it is hurried.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime.backend_protocol import BlockStatus
from kvcontrol.kv_runtime.flights import Flight, Flights, Item
from kvcontrol.kv_runtime.migrator import KVMigrator
from kvcontrol.kv_runtime.plan import PlanRefusal, Priority
from kvcontrol.kv_runtime.residency import Residency
from kvcontrol.kv_runtime.resident import Block
from kvcontrol.kv_runtime.ticket import REASON_OF_REFUSAL, Reason, Ticket, TicketKind

_HBM: Final = CacheTier.HBM
_DDR: Final = CacheTier.DDR
_NVME: Final = CacheTier.NVME
_FAILED: Final = BlockStatus.FAILED


class Loader:
    """See the module's text. Not thread-safe."""

    def __init__(self, residency: Residency, flights: Flights, migrator: KVMigrator) -> None:
        self._residency = residency
        self._flights = flights
        self._migrator = migrator
        self._waiting: dict[BlockId, list[tuple[Ticket, int]]] = {}

    def begin(self, ticket: Ticket) -> None:
        """Hold a ticket's blocks and start all transfers; blocks that can't move end at once."""
        held = {
            block.block_id: block
            for block in ticket.blocks
            if block is not None and (_DDR in block.copies or block.readable)
        }
        ticket.held = held
        ticket.repeats = len(held) < len(ticket.blocks)
        self._residency.hold(list(held.values()))
        self._route(ticket, range(len(ticket.blocks)))

    def follow(self, flight: Flight, items: Sequence[Item]) -> list[Ticket]:
        """Continue tickets that waited for an ended transfer; returns the tickets that may have ended."""
        ticket = flight.ticket
        touched = [] if ticket is None else [ticket]
        if flight.src_tier is _NVME:
            for item in items:
                for waiter, place in self._waiting.pop(item.block.block_id, ()):
                    if waiter.ends[place] is None:
                        self._route(waiter, (place,))
                        touched.append(waiter)
        if ticket is not None and ticket.pending:
            needed = _unfinished(ticket) if ticket.repeats else ()
            through = [
                item.block
                for item in items
                if item.block.block_id not in needed and ticket.held.pop(item.block.block_id, None) is not None
            ]
            self._residency.release(through)
            self._advance(ticket)
        return touched

    def give_up(self, ticket: Ticket, status: BlockStatus, reason: Reason) -> None:
        """End the parts of a ticket that are not in flight."""
        ticket.pending.clear()
        moving = self._flights.places(ticket)
        for place in range(len(ticket.blocks)):
            if place not in moving:
                ticket.end(place, status, reason)

    def _route(self, ticket: Ticket, places: Iterable[int]) -> None:
        direct: list[Item] = []
        blocks, is_load = ticket.blocks, ticket.kind is not TicketKind.PREFETCH
        for place in places:
            block = blocks[place]
            if is_load and block is not None and (ddr := block.copies.get(_DDR)) is not None:
                direct.append(Item(block, ddr, None, place))
            else:
                self._sort(ticket, place, direct)
        self._load(ticket, direct)
        self._advance(ticket)

    def _sort(self, ticket: Ticket, place: int, direct: list[Item]) -> None:
        """Choose the next step of one block."""
        block = ticket.blocks[place]
        if block is None or not block.readable:
            stalled = block is not None and block.stalled and not block.dropped
            ticket.end(place, _FAILED, Reason.STALLED if stalled else Reason.NOT_RESIDENT)
        elif (ddr := block.copies.get(_DDR)) is not None:
            if ticket.kind is TicketKind.PREFETCH:
                ticket.end(place, BlockStatus.OK, Reason.RESIDENT)
            else:
                direct.append(Item(block, ddr, None, place))
        elif (plan_id := self._flights.promotion_of(block)) is not None:
            self._migrator.hurry(plan_id, _priority(ticket))
            self._waiting.setdefault(block.block_id, []).append((ticket, place))
        else:
            ticket.pending.append(place)

    def _load(self, ticket: Ticket, items: list[Item]) -> None:
        if not items:
            return
        free_slots = self._migrator.free_slots(_DDR, _HBM, Priority.DEMAND)
        if isinstance(free_slots, PlanRefusal):
            reason, taken = REASON_OF_REFUSAL[free_slots], 0
        else:
            reason, taken = Reason.QUEUE_FULL, free_slots
            self._send(ticket, (_DDR, _HBM), items[:taken])
        for item in items[taken:]:
            ticket.end(item.place, _FAILED, reason)

    def _advance(self, ticket: Ticket) -> None:
        """Bring up as many of the blocks that wait for a slot as get one."""
        way = (_NVME, _DDR if ticket.kind is TicketKind.PREFETCH else _HBM)
        while ticket.pending:
            free_slots = self._migrator.free_slots(*way, _priority(ticket))
            if isinstance(free_slots, PlanRefusal):
                self._wait_or_end(ticket, REASON_OF_REFUSAL[free_slots])
                return
            run = self._take_run(ticket, free_slots)
            if not run:
                continue
            landings = self._residency.reserve(_DDR, run[0][1].record.tenant, len(run))
            ticket.pending.extendleft(place for place, _ in reversed(run[len(landings) :]))
            if not landings:
                self._wait_or_end(ticket, Reason.NO_SPACE)
                return
            items = [
                Item(block, block.copies[_NVME], landing, place)
                for (place, block), landing in zip(run, landings, strict=False)
            ]
            self._send(ticket, way, items)

    def _take_run(self, ticket: Ticket, free_slots: int) -> list[tuple[int, Block]]:
        """Take the next waiting blocks of one tenant, at most ``free_slots``; blocks that moved since continue."""
        run: list[tuple[int, Block]] = []
        chosen: set[BlockId] = set()
        direct: list[Item] = []
        while ticket.pending and len(run) < free_slots:
            place = ticket.pending[0]
            block = ticket.blocks[place]
            if (
                block is None
                or not block.readable
                or _DDR in block.copies
                or self._flights.promotion_of(block) is not None
            ):
                ticket.pending.popleft()
                self._sort(ticket, place, direct)
            elif block.block_id in chosen or (run and block.record.tenant != run[0][1].record.tenant):
                break
            else:
                ticket.pending.popleft()
                run.append((place, block))
                chosen.add(block.block_id)
        self._load(ticket, direct)
        return run

    def _wait_or_end(self, ticket: Ticket, reason: Reason) -> None:
        """Wait for the ticket's own transfers to make way; without any, nothing will."""
        if not ticket.plans:
            while ticket.pending:
                ticket.end(ticket.pending.popleft(), _FAILED, reason)

    def _send(self, ticket: Ticket, way: tuple[CacheTier, CacheTier], items: list[Item]) -> None:
        refusal = self._flights.begin(way, items, ticket, priority=_priority(ticket), deadline_s=ticket.deadline_s)
        if refusal is not None:
            for item in items:
                ticket.end(item.place, _FAILED, REASON_OF_REFUSAL[refusal])


def _unfinished(ticket: Ticket) -> set[BlockId]:
    """Return the blocks of a ticket that have no end in one of their places."""
    return {
        block.block_id
        for block, end in zip(ticket.blocks, ticket.ends, strict=True)
        if block is not None and end is None
    }


def _priority(ticket: Ticket) -> Priority:
    return Priority.PREFETCH if ticket.kind is TicketKind.PREFETCH else Priority.DEMAND
