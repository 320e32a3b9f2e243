"""Carries blocks between tiers, off the caller's thread: batched, by priority, measured, and with an end for each.

A plan is cut into batches, and a batch goes through one lane after the other: NVMe -> arena -> HBM are two, so that
the disk reads the next batch while the link carries this one. A lane's workers always take the most urgent batch, and
batches are small: a demand load waits for no more than those that run.

What a thread has given to a device can't be taken back. So a batch that is abandoned while it runs is *loose*: the
caller may call it lost at once, but its slots are in use until its report comes. The one thing that is never loose is
a write into engine memory: the engine would reuse blocks that are still being written.

Checksums: of bytes that come from the engine one is taken when they are in the arena; of bytes that leave the arena
for the engine it is compared, beside the copy. A durable tier compares its own (``DurableBackendProtocol``).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import (
    BlockStatus,
    DurableBackendProtocol,
    KVBackendProtocol,
    Move,
    OrderedBackendProtocol,
)
from kvcontrol.kv_runtime.checksums import Checksums, fastest
from kvcontrol.kv_runtime.crew import Crew
from kvcontrol.kv_runtime.lane import LANES_OF, Batch, Lane, LaneName, LaneStats
from kvcontrol.kv_runtime.plan import BatchReport, MigrationPlan, PlanId, PlanRefusal, Priority, Route
from kvcontrol.kv_runtime.record import BlockSeal

_log = logging.getLogger(__name__)

_OK: Final = BlockStatus.OK
_READS: Final = (LaneName.HBM_TO_DDR, LaneName.NVME_TO_DDR)
_ENGINE: Final = (LaneName.HBM_TO_DDR, LaneName.DDR_TO_HBM)
_CHUNK_BYTES: Final = 1 << 20
"""A helper is not worth its while for checksums of less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigratorConfig:
    """``batch_bytes`` is what runs at once in a worker's hands (a block where that is larger) on a way that touches the
    durable tier, ``engine_batch_bytes`` from the engine to DDR, ``load_batch_bytes`` from DDR to the engine. A link
    needs few and large batches, since each costs a few turns of the interpreter beside a busy engine, and what is
    loaded is checked while it moves, all of a batch at once; a disk is slow enough to let urgent work wait for small
    ones only.

    ``queue_blocks`` may wait at each priority in each lane. ``stall_after_s``: a lane whose device has not answered
    for so long takes nothing new. ``fence_slice_s`` is how long a worker waits for one plan's fence before it looks
    after others. ``ValueError`` for what is not > 0.
    """

    batch_bytes: int = 16 << 20
    engine_batch_bytes: int = 128 << 20
    load_batch_bytes: int = 512 << 20
    queue_blocks: int = 4096
    engine_workers: int = 2
    durable_workers: int = 4
    stall_after_s: float = 5.0
    fence_slice_s: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "batch_bytes",
            "engine_batch_bytes",
            "load_batch_bytes",
            "queue_blocks",
            "engine_workers",
            "durable_workers",
            "stall_after_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be > 0")
        if self.fence_slice_s <= 0:
            raise ValueError(f"fence_slice_s is {self.fence_slice_s}; it must be > 0")


class KVMigrator:
    """Executes plans between the slots of its tiers. One thread calls; ``stats`` may be called from any.

    Which slots are whose is the caller's to know: it must not give a slot to two plans at once.
    """

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        config: MigratorConfig,
        *,
        engine: KVBackendProtocol,
        arena: HostArena,
        durable: DurableBackendProtocol | None,
        crew: Crew,
        clock: Callable[[], float] = time.monotonic,
        checksums: Checksums | None = None,
    ) -> None:
        self.batch_blocks = max(1, config.batch_bytes // arena.block_bytes)
        self._engine_batch_blocks = {
            LaneName.HBM_TO_DDR: max(1, config.engine_batch_bytes // arena.block_bytes),
            LaneName.DDR_TO_HBM: max(1, config.load_batch_bytes // arena.block_bytes),
        }
        self._config = config
        self._arena = arena
        self._durable = durable
        self._crew = crew
        self._clock = clock
        self._sum = checksums or fastest()
        self._ordered = engine if isinstance(engine, OrderedBackendProtocol) else None
        self._ids = count()
        self._reports: deque[BatchReport] = deque()
        self._queued: deque[tuple[PlanId, int]] = deque()
        self._reported = threading.Event()
        self._lock = threading.Lock()
        self._wake: dict[LaneName, threading.Condition] = {}
        # under the lock
        self._closed = False
        self._lanes: dict[LaneName, Lane] = {
            LaneName.HBM_TO_DDR: Lane(LaneName.HBM_TO_DDR, engine),
            LaneName.DDR_TO_HBM: Lane(LaneName.DDR_TO_HBM, engine),
        }
        if durable is not None:
            self._lanes[LaneName.DDR_TO_NVME] = Lane(LaneName.DDR_TO_NVME, durable)
            self._lanes[LaneName.NVME_TO_DDR] = Lane(LaneName.NVME_TO_DDR, durable)
        self._open: dict[PlanId, dict[int, Batch]] = {}
        for name in self._lanes:
            self._wake[name] = threading.Condition(self._lock)
        workers = {
            name: config.engine_workers if lane.backend is engine else config.durable_workers
            for name, lane in self._lanes.items()
        }
        crew.start(workers, self.step)

    # The caller's side: nothing here waits for a device.

    def room(self, src_tier: CacheTier, dst_tier: CacheTier, priority: Priority) -> int | PlanRefusal:
        """Return how many more blocks may queue on that way, > 0, or why none."""
        with self._lock:
            return self._room(self._way(src_tier, dst_tier), priority)

    def migrate(self, plan: MigrationPlan) -> PlanId | PlanRefusal:
        """Queue a plan, all of it or nothing; the end of each of its routes comes with ``poll``.

        ``ValueError`` for a plan without routes, ``KeyError`` for a way that this migrator doesn't have.
        """
        if not plan.routes:
            raise ValueError("a plan without routes moves nothing; it must have at least one")
        with self._lock:
            way = self._way(plan.src_tier, plan.dst_tier)
            room = self._room(way, plan.priority)
            if isinstance(room, PlanRefusal):
                return room
            if room < len(plan.routes):
                return PlanRefusal.QUEUE_FULL
            plan_id = PlanId(next(self._ids))
            size = (
                self._engine_batch_blocks[way[0].name]
                if len(way) == 1 and way[0].name in _ENGINE
                else self.batch_blocks
            )
            self._queue(
                [
                    Batch(plan_id=plan_id, plan=plan, start=start, routes=plan.routes[start : start + size])
                    for start in range(0, len(plan.routes), size)
                ]
            )
        return plan_id

    def erase(self, slots: Sequence[int]) -> PlanId | PlanRefusal:
        """Queue the erasure of durable slots; one report, whose results are theirs. ``KeyError`` without a durable."""
        if not slots:
            raise ValueError("no slots to erase; there must be at least one")
        with self._lock:
            room = self._room((self._lanes[LaneName.DDR_TO_NVME],), Priority.DEMOTION)
            if isinstance(room, PlanRefusal):
                return room
            plan_id = PlanId(next(self._ids))
            self._queue([Batch(plan_id=plan_id, plan=None, start=0, routes=(), erase=tuple(slots))])
        return plan_id

    def abandon(self, plan_id: PlanId, status: BlockStatus) -> list[range]:
        """Give up what is left of a plan; what has not begun is reported with ``status``.

        Returns the routes that are loose (see the module's text): they may be counted as lost, and their slots come
        back with their reports. All others end as reported. Nothing happens for a plan that has ended.
        """
        loose = []
        with self._lock:
            for batch in list(self._open.get(plan_id, {}).values()):
                if batch.abandoned is not None:
                    continue
                lane = batch.lanes[batch.hop]
                batch.abandoned = status
                if batch.queued:
                    self._lanes[lane].withdraw(batch)
                    batch.statuses = _given_up(batch, status)
                    self._report(batch)
                elif lane is not LaneName.DDR_TO_HBM:
                    loose.append(range(batch.start, batch.start + len(batch.statuses)))
        return loose

    def hurry(self, plan_id: PlanId, priority: Priority) -> None:
        """Make what still waits of a plan at least so urgent."""
        with self._lock:
            for batch in list(self._open.get(plan_id, {}).values()):
                if batch.queued and priority < batch.priority:
                    self._lanes[batch.lanes[batch.hop]].hurry(batch, priority)
                elif priority < batch.priority:
                    batch.priority = priority

    def poll(self) -> list[BatchReport]:
        """Return what ended since the last call, in that order; replaces workers that died. O(workers + reports)."""
        self._crew.mend()
        if self._reported.is_set():
            self._reported.clear()  # before the reports are taken: none may come in unnoticed
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def poll_queued(self) -> list[tuple[PlanId, int]]:
        """Return plans, and how many of their blocks were verified and queued on the device since the last call.

        Whatever the engine queues after a ``join`` of its backend finds them. Their reports come as ever.
        """
        queued = []
        while self._queued:
            queued.append(self._queued.popleft())
        return queued

    def wait(self, timeout_s: float) -> bool:
        """Wait, without the GIL, until there is something to ``poll``; False when there was nothing in that time."""
        return self._reported.wait(timeout_s)

    @property
    def idle(self) -> bool:
        """Whether every plan has ended and been reported by ``poll``."""
        with self._lock:
            return not self._open and not self._reports

    def seconds_for(self, src_tier: CacheTier, dst_tier: CacheTier, blocks: int) -> float | None:
        """Return how long a demand load of so many blocks would take from now on; None where nothing was measured."""
        with self._lock:
            slowest, now_s = 0.0, self._clock()
            for lane in self._way(src_tier, dst_tier):
                bandwidth = lane.bandwidth(now_s)
                if bandwidth is None:
                    return None
                ahead = lane.queued_blocks[Priority.DEMAND] + sum(len(batch.statuses) for batch in lane.running)
                slowest = max(slowest, (ahead + blocks) * lane.backend.block_bytes / bandwidth)
        return slowest

    def stats(self) -> Mapping[LaneName, LaneStats]:
        """Return what each lane has done and has to do."""
        with self._lock:
            now_s = self._clock()
            return {name: lane.stats(now_s) for name, lane in self._lanes.items()}

    def close(self, timeout_s: float) -> bool:
        """Take nothing new, end what waits as cancelled, stop the workers; False if a device still holds one."""
        with self._lock:
            self._closed = True
            open_plans = list(self._open)
        for plan_id in open_plans:
            self.abandon(plan_id, BlockStatus.CANCELLED)
        with self._lock:
            for wake in self._wake.values():
                wake.notify_all()
        return self._crew.close(timeout_s)

    # The workers' side.

    def step(self, name: LaneName, wait_s: float) -> bool:
        """Carry one batch through a lane, waiting for one up to ``wait_s``; False when there was none."""
        with self._lock:
            lane = self._lanes[name]
            batch = lane.take()
            if batch is None:
                if wait_s > 0 and not self._closed:
                    self._wake[name].wait(wait_s)
                    batch = lane.take()
                if batch is None:
                    return False
        results = [BlockStatus.FAILED] * len(batch.statuses)
        again = False
        try:
            passed = self._passed_fence(batch)
            if passed is None:
                again = True
            elif passed:
                with self._lock:
                    lane.began(batch, self._clock())
                results = self._carry(lane, batch)
            else:
                results = _given_up(batch, BlockStatus.LATE)
        finally:
            with self._lock:
                self._settle(lane, batch, results, again=again)
        return True

    def _passed_fence(self, batch: Batch) -> bool | None:
        """Whether a batch may begin: False when it is too late, None when its fence needs more time."""
        plan = batch.plan
        if plan is None:
            return True
        left_s = plan.deadline_s - self._clock()
        if left_s <= 0:
            return False
        if plan.fence is None or batch.lanes[batch.hop] not in _ENGINE:
            return True
        return True if plan.fence.wait(min(left_s, self._config.fence_slice_s)) else None

    def _carry(self, lane: Lane, batch: Batch) -> list[BlockStatus]:
        """Do the transfer; the statuses of all routes, in order."""
        if batch.abandoned is not None:
            return _given_up(batch, batch.abandoned)
        if batch.erase:
            return self._erase(batch.erase)
        transfer = self._read if lane.name in _READS else self._write
        if batch.statuses.count(_OK) == len(batch.statuses):
            moves = _moves(lane.name, batch.routes, batch.checksums)
            results = transfer(lane, batch, range(len(moves)), moves)
            if len(results) != len(moves):
                raise ValueError(f"{lane.name}: {len(results)} statuses for {len(moves)} blocks")
            return results
        wanted = [place for place, status in enumerate(batch.statuses) if status is _OK]
        moves = _moves(lane.name, [batch.routes[place] for place in wanted], [batch.checksums[p] for p in wanted])
        results = list(batch.statuses)
        for place, status in zip(wanted, transfer(lane, batch, wanted, moves), strict=True):
            results[place] = status
        return results

    def _read(self, lane: Lane, batch: Batch, places: Sequence[int], moves: list[Move]) -> list[BlockStatus]:
        statuses = lane.backend.read(moves, self._arena)
        ended = zip(places, moves, statuses, strict=True)
        good = [(place, move.host) for place, move, status in ended if status is _OK]
        if lane.name is LaneName.HBM_TO_DDR:
            sums = self._checksums([host for _, host in good])()
            for (place, _), value in zip(good, sums, strict=True):
                batch.checksums[place] = value
        if self._arena.durable:
            for place, _ in good:
                self._seal(batch.routes[place], batch.checksums[place])
        return statuses

    def _write(self, lane: Lane, batch: Batch, places: Sequence[int], moves: list[Move]) -> list[BlockStatus]:
        if lane.name is not LaneName.DDR_TO_HBM:
            return lane.backend.write(moves, self._arena)
        if batch.hop > 0:  # the durable tier has compared them
            return self._write_engine(lane, moves, lambda: self._tell_queued(batch, len(moves)))
        wanted = [batch.checksums[place] for place in places]
        sums = self._checksums([move.host for move in moves])
        found: list[int] = []

        def compare() -> None:
            found.extend(sums())
            if found == wanted:
                self._tell_queued(batch, len(moves))

        statuses = self._write_engine(lane, moves, compare)
        return [
            status if value == expected else BlockStatus.CORRUPT
            for status, value, expected in zip(statuses, found or sums(), wanted, strict=True)
        ]

    def _write_engine(self, lane: Lane, moves: list[Move], queued: Callable[[], None]) -> list[BlockStatus]:
        if self._ordered is None:
            return lane.backend.write(moves, self._arena)
        return self._ordered.write_in_order(moves, self._arena, queued)

    def _tell_queued(self, batch: Batch, blocks: int) -> None:
        self._queued.append((batch.plan_id, blocks))
        self._reported.set()

    def _seal(self, route: Route, value: int | None) -> None:
        if value is not None:
            self._arena.seal(route.host, BlockSeal(route.record, value))

    def _erase(self, slots: Sequence[int]) -> list[BlockStatus]:
        if self._durable is None:
            raise ValueError("slots of a durable tier were erased, and there is none")
        return self._durable.erase(slots)

    def _checksums(self, hosts: list[int]) -> Callable[[], list[int]]:
        """Begin to compute arena slots' checksums, spread over the crew's helpers."""
        size = max(1, _CHUNK_BYTES // self._arena.block_bytes, -(-len(hosts) // self._crew.helpers))
        if len(hosts) * self._arena.block_bytes <= _CHUNK_BYTES:
            return lambda: self._sum(self._arena, hosts)
        parts = [
            self._crew.compute(lambda part=hosts[start : start + size]: self._sum(self._arena, part))  # type: ignore[misc]
            for start in range(0, len(hosts), size)
        ]
        return lambda: [value for part in parts for value in part()]

    # Under the lock.

    def _way(self, src_tier: CacheTier, dst_tier: CacheTier) -> tuple[Lane, ...]:
        try:
            return tuple(self._lanes[name] for name in LANES_OF[src_tier, dst_tier])
        except KeyError:
            raise KeyError(f"there is no way from {src_tier} to {dst_tier} here") from None

    def _room(self, way: tuple[Lane, ...], priority: Priority) -> int | PlanRefusal:
        if self._closed:
            return PlanRefusal.CLOSED
        now_s = self._clock()
        if any(lane.oldest_running_s(now_s) > self._config.stall_after_s for lane in way):
            return PlanRefusal.STALLED
        room = min(self._config.queue_blocks - lane.queued_blocks[priority] for lane in way)
        return room if room > 0 else PlanRefusal.QUEUE_FULL

    def _queue(self, batches: list[Batch]) -> None:
        self._open[batches[0].plan_id] = {batch.start: batch for batch in batches}
        now_s = self._clock()
        name = batches[0].lanes[0]
        for batch in batches:
            self._lanes[name].put(batch, now_s)
        self._wake[name].notify(len(batches))

    def _settle(self, lane: Lane, batch: Batch, results: list[BlockStatus], *, again: bool) -> None:
        """End a batch's stay in a lane: it goes on, comes again, or is reported."""
        now_s = self._clock()
        if again:
            if batch.abandoned is None:
                lane.put_back(batch)
                return
            results = _given_up(batch, batch.abandoned)
        else:
            moved = results.count(_OK)
            lane.ended(batch, now_s, moved=moved, failed=batch.statuses.count(_OK) - moved)
            if lane.name in _READS:
                batch.arrived = [True] * moved if moved == len(results) else [status is _OK for status in results]
        batch.statuses = results
        more = batch.hop + 1 < len(batch.lanes) and _OK in results
        if not more:
            self._report(batch)
        elif batch.abandoned is not None:
            batch.statuses = _given_up(batch, batch.abandoned)
            self._report(batch)
        else:
            batch.hop += 1
            name = batch.lanes[batch.hop]
            self._lanes[name].put(batch, now_s)
            self._wake[name].notify()

    def _report(self, batch: Batch) -> None:
        batches = self._open[batch.plan_id]
        del batches[batch.start]
        if not batches:
            del self._open[batch.plan_id]
        self._reports.append(BatchReport(batch.plan_id, batch.start, batch.statuses, batch.arrived, batch.checksums))
        self._reported.set()


def _moves(name: LaneName, routes: Sequence[Route], checksums: Sequence[int | None]) -> list[Move]:
    """Return what a lane's backend is told; seals are for durable tiers alone."""
    new = tuple.__new__  # a third of what the constructor takes, which is Python
    match name:
        case LaneName.HBM_TO_DDR:
            return [new(Move, (route.source, route.host, None)) for route in routes]
        case LaneName.DDR_TO_HBM:
            return [new(Move, (route.target, route.host, None)) for route in routes]
    slots = [route.source if name is LaneName.NVME_TO_DDR else route.target for route in routes]
    return [
        Move(slot, route.host, None if value is None else BlockSeal(route.record, value))
        for slot, route, value in zip(slots, routes, checksums, strict=True)
    ]


def _given_up(batch: Batch, status: BlockStatus) -> list[BlockStatus]:
    """Return the batch's statuses with ``status`` for what had not failed before."""
    return [status if before is _OK else before for before in batch.statuses]


__all__ = ["KVMigrator", "MigratorConfig"]
