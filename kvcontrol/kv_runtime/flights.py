"""Transfers in flight: the copies that they read and write, and the tickets that wait for them."""

from collections.abc import Iterator, Sequence
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime.backend_protocol import BlockStatus
from kvcontrol.kv_runtime.migrator import KVMigrator
from kvcontrol.kv_runtime.plan import BatchReport, BlockResult, MigrationPlan, PlanId, PlanRefusal, Priority, Route
from kvcontrol.kv_runtime.residency import Loss, Residency
from kvcontrol.kv_runtime.resident import Block, Copy
from kvcontrol.kv_runtime.ticket import REASON_OF, Ticket

_HBM: Final = CacheTier.HBM
_DDR: Final = CacheTier.DDR
_NVME: Final = CacheTier.NVME
_OK: Final = BlockStatus.OK
_BROKEN: Final = {BlockStatus.CORRUPT: Loss.CORRUPT, BlockStatus.FAILED: Loss.FAILED}


class Item:
    """One block of a flight: the copy it is read from, the copy it becomes, and its place in the ticket.

    ``loose``: its ticket has been told that it is lost; only its slots are still waited for. ``kept``: no ticket holds
    its block, so that the flight keeps the copy that it reads.
    """

    __slots__ = ("block", "kept", "landing", "loose", "place", "source")

    def __init__(self, block: Block, source: Copy | None, landing: Copy | None, place: int) -> None:
        self.block = block
        self.source = source
        self.landing = landing
        self.place = place
        self.loose = False
        self.kept = False


class Flight:
    """A plan in flight; ``left`` of its items are pending. Without a ticket no caller waits for it."""

    __slots__ = ("_ended", "dst_tier", "items", "left", "plan_id", "src_tier", "ticket")

    def __init__(
        self, plan_id: PlanId, src_tier: CacheTier, dst_tier: CacheTier, items: Sequence[Item], ticket: Ticket | None
    ) -> None:
        self.plan_id = plan_id
        self.src_tier = src_tier
        self.dst_tier = dst_tier
        self.items = items
        self.left = len(items)
        self.ticket = ticket
        self._ended: list[range] = []

    def ended(self, start: int, size: int) -> None:
        """Some of its items have come back."""
        self.left -= size
        self._ended.append(range(start, start + size))

    @property
    def open_items(self) -> list[Item]:
        """Items that have not come back. O(items)."""
        ended = {place for places in self._ended for place in places}
        return [item for place, item in enumerate(self.items) if place not in ended]


class Flights:
    """Starts transfers and follows their ends into ``Residency`` and tickets. Not thread-safe."""

    def __init__(self, residency: Residency, migrator: KVMigrator) -> None:
        self.writing = 0
        """Blocks on their way to NVMe."""
        self.failed_writes = 0
        """Of these, how many have failed since one last succeeded."""
        self._residency = residency
        self._migrator = migrator
        self._flights: dict[PlanId, Flight] = {}
        self._erasures: dict[PlanId, list[Copy]] = {}
        self._promotions: dict[BlockId, PlanId] = {}

    def __len__(self) -> int:
        return len(self._flights) + len(self._erasures)

    def promotion_of(self, block: Block) -> PlanId | None:
        """Return the plan that brings a block from NVMe to DDR at the moment."""
        return self._promotions.get(block.block_id)

    def begin(
        self,
        way: tuple[CacheTier, CacheTier],
        items: Sequence[Item],
        ticket: Ticket | None,
        *,
        priority: Priority,
        deadline_s: float,
    ) -> PlanRefusal | None:
        """Start a transfer, or return the refusal; then only the target slots have been released."""
        src_tier, dst_tier = way
        plan = MigrationPlan(
            src_tier=src_tier,
            dst_tier=dst_tier,
            routes=_routes(src_tier, dst_tier, items, ticket),
            priority=priority,
            deadline_s=deadline_s,
            fence=None if ticket is None else ticket.fence,
        )
        plan_id = self._migrator.migrate(plan)
        if isinstance(plan_id, PlanRefusal):
            for item in items:
                if item.landing is not None:
                    self._residency.discard(item.landing)
                self._residency.settle(item.block)
            return plan_id
        flight = Flight(plan_id, src_tier, dst_tier, items, ticket)
        self._flights[plan_id] = flight
        if ticket is not None:
            ticket.plans.add(plan_id)
        self._pin(flight)
        return None

    def erase(self, copies: list[Copy]) -> bool:
        """Start to erase unused copies; False if it must be retried later."""
        plan_id = self._migrator.erase([copy.slot for copy in copies])
        if isinstance(plan_id, PlanRefusal):
            return False
        self._erasures[plan_id] = copies
        return True

    def give_up(self, ticket: Ticket, status: BlockStatus) -> None:
        """End a ticket's transfers as far as they can be ended; the others end by themselves."""
        for plan_id in ticket.plans:
            flight = self._flights[plan_id]
            for loose in self._migrator.abandon(plan_id, status):
                for item in flight.items[loose.start : loose.stop]:
                    item.loose = True
                    item.block.stalled += flight.src_tier is _NVME
                    if item.source is not None and not item.kept:
                        self._keep(item, item.source)
                    ticket.end(item.place, status, REASON_OF[status])

    def abandon_all(self) -> None:
        """Cancel the parts of all transfers that have not begun, also those without a ticket."""
        for plan_id, flight in self._flights.items():
            if flight.ticket is None:
                self._migrator.abandon(plan_id, BlockStatus.CANCELLED)

    def places(self, ticket: Ticket) -> set[int]:
        """Return which of a ticket's blocks are under way."""
        return {item.place for plan_id in ticket.plans for item in self._flights[plan_id].items}

    def queued(self) -> list[Ticket]:
        """Return loads whose blocks are all verified and queued on the engine's device, but not complete.

        See ``OrderedBackendProtocol``; each once, and not those that end before.
        """
        ready = []
        for plan_id, blocks in self._migrator.reports.take_queued():
            flight = self._flights.get(plan_id)
            ticket = None if flight is None else flight.ticket
            if ticket is not None:
                ticket.queued += blocks
                if ticket.queued == len(ticket.blocks):
                    ready.append(ticket)
        return ready

    def collect(self) -> list[tuple[Flight, Sequence[Item]]]:
        """Follow the transfers that ended since the last call; returns them."""
        ended = []
        for report in _merge(self._migrator.poll()):
            erased = self._erasures.pop(report.plan_id, None)
            if erased is not None:
                self._residency.erased(erased)
                continue
            flight = self._flights[report.plan_id]
            items = flight.items[report.start : report.start + len(report)]
            if flight.src_tier is _DDR and flight.dst_tier is _HBM and report.all_ok:
                self._loaded(flight, items)
            else:
                self._follow(flight, items, report)
            flight.ended(report.start, len(items))
            if not flight.left:
                del self._flights[report.plan_id]
                if flight.dst_tier is _NVME:
                    self._touch(flight.items)
                if flight.ticket is not None:
                    flight.ticket.plans.discard(report.plan_id)
            ended.append((flight, items))
        return ended

    def copies(self) -> Iterator[Copy]:
        """Return every copy that transfers use or fill, once for each; those being erased too."""
        for flight in self._flights.values():
            for item in flight.open_items:
                yield from (copy for copy in (item.source, item.landing) if copy is not None)
        for erased in self._erasures.values():
            yield from erased

    def _loaded(self, flight: Flight, items: Sequence[Item]) -> None:
        """Do what ``_follow`` does, for blocks that went from DDR to the engine as they should."""
        residency = self._residency
        places = []
        for item in items:
            source = item.source
            if source is not None:
                if item.kept or source.doomed:
                    self._unpin(item, source)
                else:
                    source.pins -= 1
            if not item.block.copies:
                residency.settle(item.block)
            places.append(item.place)
        if flight.ticket is not None:
            flight.ticket.moved(places)

    def _follow(self, flight: Flight, items: Sequence[Item], report: BatchReport) -> None:
        landed: list[tuple[Block, Copy]] = []
        results = report.results
        for item, result in zip(items, results, strict=True):
            block = item.block
            if item.source is not None:
                self._unpin(item, item.source)
            if item.landing is not None:
                item.landing.pins -= 1
                block.arriving -= 1
                if flight.src_tier is _NVME:
                    self._promotions.pop(block.block_id, None)
                    block.stalled -= item.loose
                if _lands(flight, item, result):
                    block.checksum = result.checksum
                    landed.append((block, item.landing))
                else:
                    self._residency.discard(item.landing, erase=result.status is _OK)
        if landed:
            self._residency.land(landed)
        for item, result in zip(items, results, strict=True):
            self._lose(flight, item, result)
            if flight.ticket is not None and not item.loose:
                flight.ticket.end(item.place, result.status, REASON_OF[result.status])
            self._residency.settle(item.block)

    def _pin(self, flight: Flight) -> None:
        """Protect the slots of a flight from reuse, and its targets below from eviction."""
        writes, promotes = flight.dst_tier is _NVME, flight.src_tier is _NVME
        for item in flight.items:
            if item.source is not None:
                item.source.pins += 1
                if writes:
                    self._keep(item, item.source)
            if item.landing is not None:
                item.landing.pins += 1
                item.block.arriving += 1
                if promotes:
                    self._promotions[item.block.block_id] = flight.plan_id
        if writes:
            self.writing += len(flight.items)

    def _keep(self, item: Item, source: Copy) -> None:
        item.kept = True
        self._residency.keep(item.block, source)

    def _unpin(self, item: Item, source: Copy) -> None:
        if item.kept:
            item.kept = False
            self._residency.let_go(item.block, source)
        self._residency.unpin(source)

    def _touch(self, items: Sequence[Item]) -> None:
        """Put the paths that came to NVMe in order of use, heads after tails."""
        for place, item in enumerate(items):
            tail = place + 1 == len(items) or items[place + 1].block.record.parent != item.block.record.key
            if tail:
                self._residency.touch_before(item.block, _NVME)

    def _lose(self, flight: Flight, item: Item, result: BlockResult) -> None:
        """Take away what a transfer has shown to be of no use."""
        if flight.dst_tier is _NVME:
            self.writing -= 1
            if result.status is _OK:
                self.failed_writes = 0
            elif result.status in (BlockStatus.FAILED, BlockStatus.NO_SPACE):
                self.failed_writes += 1
            ddr = item.block.copies.get(_DDR)
            if ddr is not None and ddr.leaving:
                if _NVME in item.block.copies:
                    self._residency.lose(item.block, _DDR, Loss.EVICTED)
                elif result.status is BlockStatus.CORRUPT:
                    self._residency.lose(item.block, _DDR, Loss.CORRUPT)
                else:
                    self._residency.stay(item.block, _DDR)
            return
        # A block that came from NVMe whole and failed on its way to the engine has lost nothing there.
        guilty = item.source is not None and (flight.src_tier is _DDR or not result.arrived)
        if guilty and result.status in _BROKEN and item.block.copies.get(flight.src_tier) is item.source:
            self._residency.lose(item.block, flight.src_tier, _BROKEN[result.status], erase=True)


def _merge(reports: list[BatchReport]) -> Iterator[BatchReport]:
    """Join neighbouring batches of a plan that ended one after the other."""
    joined: BatchReport | None = None
    for report in reports:
        if joined is not None and (joined.plan_id, joined.start + len(joined)) == (report.plan_id, report.start):
            joined.extend(report)
            continue
        if joined is not None:
            yield joined
        joined = report
    if joined is not None:
        yield joined


def _routes(
    src_tier: CacheTier, dst_tier: CacheTier, items: Sequence[Item], ticket: Ticket | None
) -> tuple[Route, ...]:
    if src_tier is not _DDR or dst_tier is not _HBM or ticket is None:
        return tuple([_route(item, ticket, dst_tier) for item in items])
    new, slots = tuple.__new__, ticket.slots  # a request waits for it: the constructor takes three times as long
    return tuple(
        [
            new(Route, (block.block_id, source.slot, source.slot, slots[item.place], block.record, block.checksum))
            for item in items
            if (source := item.source) is not None and (block := item.block) is not None
        ]
    )


def _route(item: Item, ticket: Ticket | None, dst_tier: CacheTier) -> Route:
    engine = 0 if ticket is None else ticket.slots[item.place]
    source, landing, block = item.source, item.landing, item.block
    if source is None:  # from the engine
        host = 0 if landing is None else landing.slot
        return Route(block.block_id, engine, host, host, block.record, None)
    if dst_tier is _HBM:
        host = source.slot if landing is None else landing.slot
        return Route(block.block_id, source.slot, host, engine, block.record, block.checksum)
    target = 0 if landing is None else landing.slot
    host = source.slot if dst_tier is _NVME else target
    return Route(block.block_id, source.slot, host, target, block.record, block.checksum)


def _lands(flight: Flight, item: Item, result: BlockResult) -> bool:
    """Whether a copy can be used from now on."""
    if item.block.dropped:
        return False
    if flight.src_tier is _HBM:  # the engine may have reused a block that was given up
        return result.status is _OK and not item.loose
    return result.arrived if flight.src_tier is _NVME else result.status is _OK
