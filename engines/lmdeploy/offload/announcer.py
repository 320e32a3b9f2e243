"""What the tiers below an engine gain and lose: as KV events, and for the pins, which act on it."""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from engines.control.guard import Guard
from engines.events.log import EventLog
from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime import BlockRecord, Change, HierarchyManager


class ChangeWitness(Protocol):
    """Whoever must act on what tiers gain and lose. Never raises."""

    def changed_below(self, changes: Sequence[Change]) -> None:
        """Follow changes, in their order."""


class TierAnnouncer:
    """Nothing goes out before ``begin``; the engine's thread."""

    def __init__(self, guard: Guard) -> None:
        self.witness: ChangeWitness | None = None
        self._guard = guard
        self._log: EventLog | None = None

    def begin(self, log: EventLog) -> None:
        """Write to ``log`` from now on."""
        self._log = log

    def changed(self, changes: Sequence[Change]) -> None:
        """Follow changes, in their order."""
        for (tier, gained), run in groupby(changes, key=lambda change: (change.tier, change.gained)):
            records = [change.record for change in run]
            self._guard("announce blocks", None, self._gained if gained else self._lost, tier, records)
        if self.witness is not None:
            self.witness.changed_below(changes)

    def announce_all(self, hierarchy: HierarchyManager) -> None:
        """Announce all that lies below HBM, after an event by which nothing was anywhere."""
        if self._log is None:
            return
        for block_id, record in hierarchy.blocks():
            for tier in hierarchy.locate(block_id):
                self._log.stored(record.key, parent=record.parent, tokens=record.tokens, tier=tier)

    def _gained(self, tier: CacheTier, records: Sequence[BlockRecord]) -> None:
        if self._log is not None:
            self._log.stored_all([(record.key, record.parent, record.tokens) for record in records], tier=tier)

    def _lost(self, tier: CacheTier, records: Sequence[BlockRecord]) -> None:
        if self._log is not None:
            self._log.removed_all([record.key for record in records], tier=tier)
