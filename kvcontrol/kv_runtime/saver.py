"""Saves: which blocks of a path are new, which find room, and their way from the engine to DDR."""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.backend_protocol import BlockStatus
from kvcontrol.kv_runtime.flights import Flights, Item
from kvcontrol.kv_runtime.migration_gate import MigrationGate
from kvcontrol.kv_runtime.migrator import KVMigrator
from kvcontrol.kv_runtime.plan import PlanRefusal, Priority
from kvcontrol.kv_runtime.record import BlockRecord
from kvcontrol.kv_runtime.residency import Residency
from kvcontrol.kv_runtime.ticket import REASON_OF_REFUSAL, Reason, Ticket

_HBM: Final = CacheTier.HBM
_DDR: Final = CacheTier.DDR
_FAILED: Final = BlockStatus.FAILED


class Saver:
    """See the module's text. Not thread-safe."""

    def __init__(self, residency: Residency, flights: Flights, migrator: KVMigrator, gate: MigrationGate) -> None:
        self.collisions = 0
        """Blocks that had another's key and other tokens."""
        self._residency = residency
        self._flights = flights
        self._migrator = migrator
        self._gate = gate

    def begin(self, ticket: Ticket, records: Sequence[BlockRecord]) -> None:
        """Hold resident blocks, start saves for which there is space, end the rest."""
        fresh = self._sort(ticket, records)
        self._residency.hold(list(ticket.held.values()))
        if fresh and self._gate.plan((_HBM, _DDR), [records[place] for place in fresh], ()).plan is None:
            _refuse(ticket, fresh, Reason.NOT_WORTH)
            return
        free_slots = self._migrator.free_slots(_HBM, _DDR, Priority.SAVE)
        if isinstance(free_slots, PlanRefusal):
            _refuse(ticket, fresh, REASON_OF_REFUSAL[free_slots])
            return
        _refuse(ticket, fresh[free_slots:], Reason.QUEUE_FULL)
        self._save(ticket, records, fresh[:free_slots])

    def _sort(self, ticket: Ticket, records: Sequence[BlockRecord]) -> list[int]:
        """End blocks that need no copy and mark those to hold; return the places of the rest, in order."""
        fresh = []
        for place, record in enumerate(records):
            block = self._residency.of_key(record.key)
            if block is None:
                fresh.append(place)
            elif (block.record.tokens, block.record.parent) != (record.tokens, record.parent):
                self.collisions += 1
                _refuse(ticket, range(place, len(records)), Reason.COLLISION)
                break
            else:
                ticket.blocks[place] = block
                if block.readable:
                    ticket.held[block.block_id] = block
                    ticket.end(place, BlockStatus.OK, Reason.RESIDENT)
                else:
                    ticket.end(place, _FAILED, Reason.IN_FLIGHT)
        return fresh

    def _save(self, ticket: Ticket, records: Sequence[BlockRecord], fresh: Sequence[int]) -> None:
        items: list[Item] = []
        for tenant, run in groupby(fresh, key=lambda place: records[place].tenant):
            places = list(run)
            landings = self._residency.reserve(_DDR, tenant, len(places))
            for place, landing in zip(places, landings, strict=False):
                block = self._residency.new(records[place])
                ticket.blocks[place] = block
                items.append(Item(block, None, landing, place))
            if len(landings) < len(places):
                break  # what comes after a gap could never be found
        _refuse(ticket, fresh[len(items) :], Reason.NO_SPACE)
        if not items:
            return
        added = [item.block for item in items]
        self._residency.hold(added)
        mine = ticket.held.keys() | {block.block_id for block in added}
        ticket.held = {b.block_id: b for b in ticket.blocks if b is not None and b.block_id in mine}
        refusal = self._flights.begin((_HBM, _DDR), items, ticket, priority=Priority.SAVE, deadline_s=ticket.deadline_s)
        if refusal is not None:
            _refuse(ticket, [item.place for item in items], REASON_OF_REFUSAL[refusal])


def _refuse(ticket: Ticket, places: Sequence[int], reason: Reason) -> None:
    for place in places:
        ticket.end(place, _FAILED, reason)
