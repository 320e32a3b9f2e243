"""Demotes blocks from DDR to NVMe in the background: the only writer of the durable tier.

Three ways (``WriteMode``): at once, when a block is about to leave DDR, or once it has proved useful. What is due waits
in a list that costs nothing, and only a few batches at a time are given to the device: a block that must make way in
the meantime simply does, so saving never runs at the pace of a disk.

A device that fails again and again is left alone for a while; what could not be written is lost when it is evicted.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.core.watermarks import Watermarks
from kvcontrol.core.write_mode import WriteMode
from kvcontrol.kv_runtime.flights import Flights, Item
from kvcontrol.kv_runtime.migration_gate import MigrationGate
from kvcontrol.kv_runtime.migrator import KVMigrator
from kvcontrol.kv_runtime.plan import PlanRefusal, Priority
from kvcontrol.kv_runtime.quota import QuotaManager
from kvcontrol.kv_runtime.residency import Loss, Residency
from kvcontrol.kv_runtime.resident import Block
from kvcontrol.kv_runtime.ticket import Ticket

_DDR: Final = CacheTier.DDR
_NVME: Final = CacheTier.NVME
_NEVER: Final = float("inf")
_AHEAD_BATCHES: Final = 16
"""Batches that may be under way to NVMe at once."""
_FAILURES: Final = 3
"""Blocks in a row that fail until the device is left alone."""
_STEP_BLOCKS: Final = 256
"""What one call takes away at most, so that no call takes long."""


NO_SPACE: Final = "no_room"
NOT_WORTH: Final = "not_worth"


class Demoter:
    """See the module's text. Not thread-safe."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        residency: Residency,
        flights: Flights,
        migrator: KVMigrator,
        quotas: QuotaManager,
        gate: MigrationGate,
        *,
        mode: WriteMode,
        watermarks: dict[CacheTier, Watermarks],
        retry_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watermarks = watermarks
        self.skipped: Counter[str] = Counter()
        """Blocks that were not written, by reason."""
        self._durable = _NVME in residency.spaces
        self._residency = residency
        self._flights = flights
        self._migrator = migrator
        self._quotas = quotas
        self._gate = gate
        self._mode = mode
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._due: OrderedDict[BlockId, None] = OrderedDict()
        self._max_due = 2 * residency.spaces[_DDR].capacity_blocks
        self._paused_until_s = 0.0
        self._quotas_seen = -1

    @property
    def waiting(self) -> int:
        """Blocks that are due and can be written as soon as the device takes them."""
        return 0 if self._paused else len(self._due)

    def saved(self, blocks: Iterable[Block]) -> None:
        """Follow blocks that came from the engine."""
        if self._mode is WriteMode.THROUGH and self._durable:
            self._await(blocks)

    def used(self, blocks: Iterable[Block | None]) -> None:
        """Follow blocks that were used again."""
        if self._mode is WriteMode.SECOND_USE and self._durable:
            self._await(block for block in blocks if block is not None)

    def flush(self) -> None:
        """Make every block that is in DDR alone due: before an orderly end."""
        if self._durable:
            self._await(self._residency.blocks())

    def write(self, blocks: Sequence[tuple[int, Block]], ticket: Ticket | None = None) -> set[int]:
        """Start to write blocks (with their places in the ticket) that are in DDR alone; returns which, by place.

        The rest is counted as skipped. What no ticket asks for is written only if the policy says so.
        """
        if ticket is None and blocks:
            records = [block.record for _, block in blocks]
            if self._gate.plan((_DDR, _NVME), records, [block.block_id for _, block in blocks]).plan is None:
                self.skipped[NOT_WORTH] += len(blocks)
                return set()
        free_slots = self._migrator.free_slots(_DDR, _NVME, Priority.DEMOTION)
        if isinstance(free_slots, PlanRefusal):
            self.skipped[free_slots] += len(blocks)
            return set()
        items = []
        wanted = blocks[:free_slots]
        self.skipped[PlanRefusal.QUEUE_FULL] += len(blocks) - len(wanted)
        for tenant, run in groupby(wanted, key=lambda placed: placed[1].record.tenant):
            placed = list(run)
            landings = self._residency.reserve(_NVME, tenant, len(placed))
            self.skipped[NO_SPACE] += len(placed) - len(landings)
            for (place, block), landing in zip(placed, landings, strict=False):
                items.append(Item(block, block.copies[_DDR], landing, place))
        if not items:
            return set()
        refusal = self._flights.begin((_DDR, _NVME), items, ticket, priority=Priority.DEMOTION, deadline_s=_NEVER)
        return {item.place for item in items} if refusal is None else set()

    def work(self) -> None:
        """Do a bounded step of the due work: erasures, writes, watermarks, reduced bursts."""
        if self._durable:
            self._erase()
            if self._flights.failed_writes >= _FAILURES and not self._paused:
                self._paused_until_s = self._clock() + self._retry_after_s
                self._flights.failed_writes = 0
            if self._due and not self._paused:
                self._write_due()
        for tier, marks in self.watermarks.items():
            if marks.high < 1:
                self._relieve(tier, marks)
        if self._quotas.revision != self._quotas_seen:
            self._trim()

    def _await(self, blocks: Iterable[Block]) -> None:
        """Put blocks that are in DDR alone on the list; the oldest, which DDR has long evicted, fall off its end."""
        self._due.update((block.block_id, None) for block in blocks if _alone(block))
        while len(self._due) > self._max_due:
            self._due.popitem(last=False)
            self.skipped[PlanRefusal.QUEUE_FULL] += 1

    @property
    def _paused(self) -> bool:
        return self._clock() < self._paused_until_s

    @property
    def _budget(self) -> int:
        return _AHEAD_BATCHES * self._migrator.batch_blocks - self._flights.writing

    def _erase(self) -> None:
        copies = self._residency.to_erase
        if copies and self._flights.erase(copies[:_STEP_BLOCKS]):
            del copies[:_STEP_BLOCKS]

    def _write_due(self) -> None:
        budget = min(self._budget, _STEP_BLOCKS)
        if budget < min(len(self._due), self._migrator.batch_blocks):
            return  # small batches are slow ones
        blocks: list[Block] = []
        taken: list[BlockId] = []
        for block_id in self._due:
            if len(blocks) >= budget or len(taken) >= 4 * _STEP_BLOCKS:
                break
            taken.append(block_id)
            block = self._residency.get(block_id)
            if block is not None and _alone(block):
                blocks.append(block)
        for block_id in taken:
            del self._due[block_id]
        if blocks:
            self.write(list(enumerate(blocks)))

    def _relieve(self, tier: CacheTier, marks: Watermarks) -> None:
        space = self._residency.spaces[tier]
        leaving = self._flights.writing if tier is _DDR else 0
        if space.slots.used - leaving <= marks.high * space.capacity_blocks:
            return
        excess = min(_STEP_BLOCKS, space.slots.used - leaving - int(marks.low * space.capacity_blocks))
        back = tier is _DDR and self._mode is WriteMode.BACK and self._durable
        if back:
            excess = min(excess, self._budget) if not self._paused else 0
        for tenant, blocks in self._quotas.donors(None, tier, excess, space.evictable.of_tenant):
            if back:
                self._leave(tenant, blocks)
            else:
                self._residency.trim(tier, tenant, blocks)

    def _leave(self, tenant: str, count: int) -> None:
        """Write back a tenant's next victims; they go when they are written."""
        to_write = []
        for block_id in self._residency.spaces[_DDR].victims(tenant, count):
            block = self._residency.get(block_id)
            if block is None:
                raise KeyError(f"a policy of {tenant} chose block {block_id}, which is nowhere")
            self._residency.spaces[_DDR].leave(block)
            if _alone(block):
                to_write.append(block)
            elif _NVME in block.copies:
                self._residency.lose(block, _DDR, Loss.EVICTED)
        if to_write:
            self.write(list(enumerate(to_write)))
        for block in to_write:
            if not block.arriving and _DDR in block.copies:
                self._residency.lose(block, _DDR, Loss.UNWRITTEN)

    def _trim(self) -> None:
        """Evict blocks beyond reduced bursts; held blocks follow later."""
        left = False
        for tier in self._residency.spaces:
            for tenant, blocks in self._quotas.over_burst(tier):
                self._residency.trim(tier, tenant, min(blocks, _STEP_BLOCKS))
            left = left or bool(self._quotas.over_burst(tier))
        if not left:
            self._quotas_seen = self._quotas.revision


def _alone(block: Block) -> bool:
    """Whether a block is in DDR and neither in NVMe nor on its way."""
    return not block.dropped and not block.arriving and len(block.copies) == 1 and _DDR in block.copies
