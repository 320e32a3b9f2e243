"""Tiers below the engine's memory: which blocks are there, and how they come and go.

    save       HBM -> DDR       as many as find room, best effort
    load       DDR -> HBM       straight, or NVMe -> DDR -> HBM in pipelined batches
    prefetch   NVMe -> DDR      because a request may come for it
    demotion   DDR -> NVMe      in the background (``Demoter``)

The owner's thread decides, in memory, and never waits; ``KVMigrator``'s threads move bytes. What they have done becomes
true in ``poll``, on the owner's thread. So nothing here needs a lock, and a block that ``find`` has named stays where
it is until the owner's next call.

Every call ends in a value: a block that can't be saved or loaded says why, and is a miss. A block whose tier could not
give it, or gave other bytes, leaves that tier at once: it fails once.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.cost_benefit import CostBenefitModel
from kvcontrol.kv_policy.eviction import EvictionPolicy
from kvcontrol.kv_policy.migration import MigrationPolicy
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, DurableBackendProtocol, Fence, KVBackendProtocol
from kvcontrol.kv_runtime.claims import Claims, check_distinct
from kvcontrol.kv_runtime.crew import Crew, ThreadCrew
from kvcontrol.kv_runtime.demoter import Demoter
from kvcontrol.kv_runtime.directory import Directory
from kvcontrol.kv_runtime.errors import KvRuntimeError
from kvcontrol.kv_runtime.exchange import Exchange
from kvcontrol.kv_runtime.flights import Flights
from kvcontrol.kv_runtime.hierarchy_config import HierarchyConfig
from kvcontrol.kv_runtime.hierarchy_stats import HierarchyStats, TierStats
from kvcontrol.kv_runtime.hits import TierHits
from kvcontrol.kv_runtime.loader import Loader
from kvcontrol.kv_runtime.migration_gate import MigrationGate
from kvcontrol.kv_runtime.migrator import KVMigrator
from kvcontrol.kv_runtime.prompt import Prompt
from kvcontrol.kv_runtime.quota import QuotaManager
from kvcontrol.kv_runtime.record import BlockRecord, check_path
from kvcontrol.kv_runtime.residency import Residency
from kvcontrol.kv_runtime.saver import Saver
from kvcontrol.kv_runtime.ticket import (
    Progress,
    Reason,
    SaveRequest,
    SaveTicket,
    TicketId,
    TicketKind,
)
from kvcontrol.kv_runtime.ticket_book import TicketBook
from kvcontrol.kv_runtime.tier_policies import TierPolicies
from kvcontrol.kv_runtime.tier_space import TierSpace

_HBM: Final = CacheTier.HBM
_DDR: Final = CacheTier.DDR
_NVME: Final = CacheTier.NVME
_OK: Final = BlockStatus.OK
_DRAIN_STEP_S: Final = 0.001
_NO_PROGRESS: Final = Progress(finished=(), changes=())


class HierarchyManager(Directory):
    """See the module's text. One thread owns it; ``stats``, ``get_block_info`` and ``locate`` may be called from any.

    Misuse (blocks named twice, slots that don't exist, ``release`` of what isn't held) is a ``ValueError`` and changes
    nothing; what a device, a peer or a full tier does never raises.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        config: HierarchyConfig,
        *,
        engine: KVBackendProtocol,
        arena: HostArena,
        durable: DurableBackendProtocol | None,
        make_policy: Callable[[], EvictionPolicy],
        quotas: QuotaManager,
        clock: Callable[[], float] = time.monotonic,
        crew: Crew | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._arena = arena
        self._durable = durable
        self._clock = clock
        self.quotas = quotas
        """Quotas of tenants; changed by the owner's thread."""
        space = partial(TierSpace, block_bytes=arena.block_bytes, make_policy=make_policy, quotas=quotas)
        spaces = {_DDR: space(_DDR, capacity_blocks=arena.slots, on_free=arena.unseal)}
        if durable is not None:
            spaces[_NVME] = space(_NVME, capacity_blocks=durable.capacity_blocks, on_free=_nothing)
        self._spaces = spaces
        if crew is None:
            crew = ThreadCrew(helpers=config.checksum_workers, switch_interval_s=config.switch_interval_s)
        self._crew = crew
        super().__init__(
            Residency(spaces, clock=clock),
            KVMigrator(config.migrator, engine=engine, arena=arena, durable=durable, crew=crew, clock=clock),
            block_bytes=arena.block_bytes,
        )
        self.claims = Claims(self._residency)
        """Blocks that callers protect from eviction; the owner's thread."""
        self.policies = TierPolicies(self._residency)
        """The policies of the tiers and their swaps; the owner's thread."""
        self.costs = CostBenefitModel()
        """What computing and moving cost, as measured; the owner's thread tells it of prefills."""
        self.gate = MigrationGate(
            MigrationPolicy(config.migrate), self.costs, self._migrator, block_bytes=arena.block_bytes
        )
        self._flights = Flights(self._residency, self._migrator)
        self._saver = Saver(self._residency, self._flights, self._migrator, self.gate)
        self._loader = Loader(self._residency, self._flights, self._migrator)
        self._demoter = Demoter(
            self._residency,
            self._flights,
            self._migrator,
            quotas,
            self.gate,
            mode=config.write_mode,
            watermarks={_DDR: config.ddr} | ({} if durable is None else {_NVME: config.nvme}),
            retry_after_s=config.retry_writes_after_s,
            clock=clock,
        )
        self._book = TicketBook(self._residency, self._flights, self._loader, costs=self.costs, clock=clock)
        self._hits = TierHits(self.costs)
        self._record_bytes = min(arena.record_bytes, sys.maxsize if durable is None else durable.record_bytes)
        self.exchange = Exchange(self._residency, on_arrival=self._demoter.saved, record_bytes=self._record_bytes)
        """Blocks that go to and come from other processes; the owner's thread."""

    def requested(self, prompt: Prompt) -> None:
        """Follow a prompt that came, once, before anything of it is held, loaded or saved.

        What of it can be read here counts as used now, and policies that follow prompts are told of it. O(blocks) where
        a tier's policy asks for that; nothing otherwise.
        """
        if self._residency.follows_requests:
            run = self.find_run(prompt.keys, prompt.tokens, 0, len(prompt.keys))
            self._residency.requested(prompt, run.block_ids)

    # Moving.

    def save(
        self,
        blocks: Sequence[SaveRequest],
        *,
        heads_held: bool = False,
        fence: Fence | None = None,
        deadline_s: float | None = None,
    ) -> SaveTicket:
        """Keep one path of engine blocks, in prompt order, as far as there is room.

        Blocks that are there already cost nothing and may be named or not. The engine's slots must not change until
        the ticket has ended. ``heads_held``: the caller holds what of the path is not named until after that, so that
        what comes before need not be counted as used here.
        """
        _check_slots([request.engine_slot for request in blocks], self._engine.capacity_blocks)
        check_path([request.record for request in blocks], record_bytes=self._record_bytes)
        ticket = self._book.open(TicketKind.SAVE, len(blocks), _or(deadline_s, self._config.save_deadline_s), fence)
        ticket.slots = [request.engine_slot for request in blocks]
        ticket.heads_held = heads_held
        self._saver.begin(ticket, [request.record for request in blocks])
        self._demoter.used(list(ticket.held.values()))
        self._book.settle(ticket)
        ids = tuple(None if block is None else block.block_id for block in ticket.blocks)
        return SaveTicket(ticket_id=ticket.ticket_id, block_ids=ids)

    def load(
        self,
        block_ids: Sequence[BlockId],
        engine_slots: Sequence[int],
        *,
        fence: Fence | None = None,
        deadline_s: float | None = None,
        expected_s: float | None = None,
    ) -> TicketId:
        """Bring blocks into the engine's slots, before everything else; they are held until the ticket has ended.

        The engine must neither read nor reuse the slots until then. What isn't ``OK`` then may hold anything.
        ``expected_s`` is how long it was estimated to take: the cost model learns how wrong that was.
        """
        if len(block_ids) != len(engine_slots):
            raise ValueError(
                f"{len(block_ids)} blocks for {len(engine_slots)} engine slots; there must be one for each"
            )
        _check_slots(engine_slots, self._engine.capacity_blocks)
        ticket = self._book.open(TicketKind.LOAD, len(block_ids), _or(deadline_s, self._config.load_deadline_s), fence)
        ticket.slots = list(engine_slots)
        ticket.expected_s = expected_s
        ticket.blocks = [self._residency.get(block_id) for block_id in block_ids]
        self._hits.count(ticket.blocks)
        self._demoter.used(ticket.blocks)
        self._loader.begin(ticket)
        self._book.settle(ticket)
        return ticket.ticket_id

    def check_ahead(self, block_ids: Sequence[BlockId]) -> None:
        """Begin to verify held blocks that the next ``load`` will name, while their slots are being found; a hint."""
        copies = [block.copies.get(_DDR) for block in map(self._residency.get, block_ids) if block is not None]
        if len(slots := [copy.slot for copy in copies if copy is not None]) == len(block_ids):
            self._migrator.check_ahead(slots)

    def prefetch(self, block_ids: Sequence[BlockId], *, deadline_s: float | None = None) -> TicketId:
        """Copy blocks from NVMe to DDR before a request needs them."""
        ticket = self._book.open(TicketKind.PREFETCH, len(block_ids), _or(deadline_s, self._config.prefetch_deadline_s))
        ticket.blocks = [self._residency.get(block_id) for block_id in block_ids]
        self._loader.begin(ticket)
        self._book.settle(ticket)
        return ticket.ticket_id

    def demote(self, block_ids: Sequence[BlockId]) -> TicketId:
        """Write blocks that are in DDR alone to NVMe now; they stay in DDR until room is needed."""
        check_distinct(block_ids)
        ticket = self._book.open(TicketKind.DEMOTE, len(block_ids), math.inf)
        ticket.blocks = [self._residency.get(block_id) for block_id in block_ids]
        alone = []
        for place, block in enumerate(ticket.blocks):
            if block is None or not block.readable:
                ticket.end(place, BlockStatus.FAILED, Reason.NOT_RESIDENT)
            elif _NVME in block.copies:
                ticket.end(place, _OK, Reason.RESIDENT)
            elif block.arriving:
                ticket.end(place, BlockStatus.FAILED, Reason.IN_FLIGHT)
            else:
                alone.append((place, block))
        started = self._demoter.write(alone, ticket)
        for place, _ in alone:
            if place not in started:
                ticket.end(place, BlockStatus.FAILED, Reason.NO_SPACE)
        self._book.settle(ticket)
        return ticket.ticket_id

    def cancel(self, ticket_id: TicketId) -> None:
        """End a ticket as soon as its engine slots are safe; an ended ticket stays unchanged."""
        ticket = self._book.get(ticket_id)
        if ticket is not None:
            self._book.give_up(ticket, BlockStatus.CANCELLED)

    def drop(self, block_ids: Sequence[BlockId] | None = None) -> None:
        """Forget blocks in all tiers, None for all: no ``find`` and no restart sees them again.

        Transfers of theirs that are under way end as they would have.
        """
        if block_ids is None:
            block_ids = [block.block_id for block in self._residency.blocks()]
        for block_id in block_ids:
            block = self._residency.get(block_id)
            if block is not None and not block.dropped:
                self._residency.drop(block)

    # Time.

    def poll(self) -> Progress:
        """Follow the workers' progress, start due work, and return ended tickets and changes. Never waits."""
        self._advance()
        queued = tuple([ticket.ticket_id for ticket in self._flights.queued()])
        finished, changes = self._book.take_finished(), self._residency.take_changes()
        if not (finished or changes or queued):
            return _NO_PROGRESS
        return Progress(finished=finished, changes=changes, queued=queued)

    def wait(self, timeout_s: float) -> bool:
        """Wait, without the GIL, until the workers have something for ``poll``; False after ``timeout_s``."""
        return self._migrator.reports.wait(timeout_s)

    def recover(self) -> list[tuple[BlockId, BlockRecord]]:
        """Find the blocks of an earlier process again, in DDR (shared memory) and NVMe; only before anything else.

        Blocks get new ids. Their order of use is not known: heads count as used after their tails. Takes as long as the
        devices take to be looked through. ``KvRuntimeError`` when it comes too late.
        """
        if len(self._residency) or len(self._book):
            raise KvRuntimeError("recover comes before the first save; there are blocks already")
        self._residency.restore(_DDR, self._arena.recover())
        if self._durable is not None:
            self._residency.restore(_NVME, self._durable.recover())
        return [(block.block_id, block.record) for block in self._residency.blocks()]

    def drain(self, timeout_s: float, *, flush: bool = False) -> bool:
        """Wait until every ticket has ended and nothing is to be written; ``flush`` writes all that is in DDR alone.

        At the end of the time what is left is cancelled. False when a device still holds something: then engine memory
        and arena may still be touched. What ended is returned by the next ``poll``.
        """
        if flush:
            self._demoter.flush()
        until_s = time.monotonic() + timeout_s
        self._advance()
        while not self._at_rest and time.monotonic() < until_s:
            time.sleep(_DRAIN_STEP_S)
            self._advance()
        if not self._at_rest:
            self._book.end_all(BlockStatus.CANCELLED)
            self._flights.abandon_all()
            self._follow()
        return not len(self._book) and not len(self._flights)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel what is left and stop the workers; False if a device still holds one, or somebody has slots from
        ``exchange``: memory must stay.

        Arena and backends are the caller's to close. Idempotent.
        """
        self._book.end_all(BlockStatus.CANCELLED)
        stopped = self._migrator.close(timeout_s)
        self._follow()
        return stopped and not len(self.exchange)

    def stats(self) -> HierarchyStats:
        """Return residency and counters; any thread (numbers may then be a moment apart)."""
        losses, hits = self._residency.losses.copy(), self._hits.by_tenant.copy()
        tiers = {tier: TierStats.of(space, self.quotas, hits, losses) for tier, space in self._spaces.items()}
        return HierarchyStats(
            tiers=tiers,
            lanes=self._migrator.stats(),
            outcomes=self._book.outcomes.copy(),
            skipped_writes=self._demoter.skipped.copy(),
            due_writes=self._demoter.waiting,
            open_tickets=len(self._book),
            collisions=self._saver.collisions + self._surveyed_collisions,
            worker_faults=self._crew.faults,
            errors=self.costs.errors(),
            benefits=self.gate.policy.benefits(),
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other. O(blocks)."""
        self._residency.check_integrity(chain(self._flights.copies(), self.exchange.copies()))

    # Inside.

    @property
    def _at_rest(self) -> bool:
        return not (len(self._book) or len(self._flights) or self._demoter.waiting or self._residency.to_erase)

    def _advance(self) -> None:
        self._book.expire()
        self._follow()
        self._demoter.work()

    def _follow(self) -> None:
        for flight, items in self._flights.collect():
            if flight.src_tier is _HBM:
                self.costs.stored(_DDR, len(items))
                self._demoter.saved([item.block for item in items])
            elif flight.dst_tier is _NVME:
                self.costs.stored(_NVME, len(items))
            for ticket in self._loader.follow(flight, items):
                self._book.settle(ticket)


def _check_slots(slots: Sequence[int], capacity: int) -> None:
    if len(set(slots)) != len(slots):
        raise ValueError("an engine slot is named twice; each may come once")
    if slots and not (min(slots) >= 0 and max(slots) < capacity):
        strange = next(slot for slot in slots if not 0 <= slot < capacity)
        raise ValueError(f"engine slot {strange} of {capacity}")


def _or(deadline_s: float | None, default_s: float) -> float:
    return default_s if deadline_s is None else deadline_s


def _nothing(slot: int) -> None:
    """A durable slot that is given up is overwritten later."""
