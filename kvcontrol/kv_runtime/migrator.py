"""Carries blocks between tiers, off the caller's thread: batched, by priority, measured, and with an end for each.

A plan is cut into batches, and a batch goes through one lane after the other: NVMe -> arena -> HBM are two, so that
the disk reads the next batch while the link carries this one. A lane's workers always take the most urgent batch, and
batches are small: a demand load waits for no more than those that run.

What a thread has given to a device can't be taken back. So a batch that is abandoned while it runs is *loose*: the
caller may call it lost at once, but its slots are in use until its report comes. The one thing that is never loose is
a write into engine memory: the engine would reuse blocks that are still being written.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, DurableBackendProtocol, KVBackendProtocol
from kvcontrol.kv_runtime.carrier import READS, Carrier
from kvcontrol.kv_runtime.checksums import Checksums, fastest
from kvcontrol.kv_runtime.crew import Crew
from kvcontrol.kv_runtime.lane import LANES_OF, Batch, Lane, LaneName, LaneStats
from kvcontrol.kv_runtime.migrator_config import MigratorConfig
from kvcontrol.kv_runtime.plan import BatchReport, MigrationPlan, PlanId, PlanRefusal, Priority
from kvcontrol.kv_runtime.reports import Reports

_log = logging.getLogger(__name__)

_OK: Final = BlockStatus.OK
_ENGINE: Final = (LaneName.HBM_TO_DDR, LaneName.DDR_TO_HBM)


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
        self._crew = crew
        self._clock = clock
        self.reports = Reports()
        """What workers report; the owner's thread takes it."""
        self._carrier = Carrier(
            engine=engine,
            arena=arena,
            durable=durable,
            crew=crew,
            checksums=checksums or fastest(),
            report_queued=self.reports.queued,
            ahead_bytes=config.check_ahead_bytes,
        )
        self._ids = count()
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

    def free_slots(self, src_tier: CacheTier, dst_tier: CacheTier, priority: Priority) -> int | PlanRefusal:
        """Return how many more blocks may queue on that way, > 0, or why none."""
        with self._lock:
            return self._free_slots(self._way(src_tier, dst_tier), priority)

    def migrate(self, plan: MigrationPlan) -> PlanId | PlanRefusal:
        """Queue a plan, all of it or nothing; the end of each of its routes comes with ``poll``.

        ``ValueError`` for a plan without routes, ``KeyError`` for a way that this migrator doesn't have.
        """
        if not plan.routes:
            raise ValueError("a plan without routes moves nothing; it must have at least one")
        with self._lock:
            way = self._way(plan.src_tier, plan.dst_tier)
            free_slots = self._free_slots(way, plan.priority)
            if isinstance(free_slots, PlanRefusal):
                return free_slots
            if free_slots < len(plan.routes):
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

    def check_ahead(self, hosts: Sequence[int]) -> None:
        """Begin to verify arena slots that a plan to the engine will name next; a hint."""
        self._carrier.check_ahead(list(hosts))

    def erase(self, slots: Sequence[int]) -> PlanId | PlanRefusal:
        """Queue the erasure of durable slots; one report, whose results are theirs. ``KeyError`` without a durable."""
        if not slots:
            raise ValueError("no slots to erase; there must be at least one")
        with self._lock:
            free_slots = self._free_slots((self._lanes[LaneName.DDR_TO_NVME],), Priority.DEMOTION)
            if isinstance(free_slots, PlanRefusal):
                return free_slots
            plan_id = PlanId(next(self._ids))
            self._queue([Batch(plan_id=plan_id, plan=None, start=0, routes=(), erase=tuple(slots))])
        return plan_id

    def abandon(self, plan_id: PlanId, status: BlockStatus) -> list[range]:
        """Cancel the rest of a plan; parts that have not begun are reported with ``status``.

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
                    batch.statuses = batch.given_up(status)
                    self._report(batch)
                elif lane is not LaneName.DDR_TO_HBM:
                    loose.append(range(batch.start, batch.start + len(batch.statuses)))
        return loose

    def hurry(self, plan_id: PlanId, priority: Priority) -> None:
        """Raise the priority of a plan's waiting parts to at least this one."""
        with self._lock:
            for batch in list(self._open.get(plan_id, {}).values()):
                if batch.queued and priority < batch.priority:
                    self._lanes[batch.lanes[batch.hop]].hurry(batch, priority)
                elif priority < batch.priority:
                    batch.priority = priority

    def poll(self) -> list[BatchReport]:
        """Return the reports since the last call, in order; replaces dead workers. O(workers + reports)."""
        self._crew.mend()
        return self.reports.take()

    @property
    def idle(self) -> bool:
        """Whether every plan has ended and been reported by ``poll``."""
        with self._lock:
            return not self._open and not len(self.reports)

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
        """Return each lane's finished and pending work."""
        with self._lock:
            now_s = self._clock()
            return {name: lane.stats(now_s) for name, lane in self._lanes.items()}

    def close(self, timeout_s: float) -> bool:
        """Accept no new plans, cancel waiting ones, stop the workers; False if a device still holds one."""
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
                results = self._carrier.carry(lane, batch)
            else:
                results = batch.given_up(BlockStatus.LATE)
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

    # Under the lock.

    def _way(self, src_tier: CacheTier, dst_tier: CacheTier) -> tuple[Lane, ...]:
        try:
            return tuple(self._lanes[name] for name in LANES_OF[src_tier, dst_tier])
        except KeyError:
            raise KeyError(f"no path from {src_tier} to {dst_tier}") from None

    def _free_slots(self, way: tuple[Lane, ...], priority: Priority) -> int | PlanRefusal:
        if self._closed:
            return PlanRefusal.CLOSED
        now_s = self._clock()
        if any(lane.oldest_running_s(now_s) > self._config.stall_after_s for lane in way):
            return PlanRefusal.STALLED
        free_slots = min(self._config.queue_blocks - lane.queued_blocks[priority] for lane in way)
        return free_slots if free_slots > 0 else PlanRefusal.QUEUE_FULL

    def _queue(self, batches: list[Batch]) -> None:
        self._open[batches[0].plan_id] = {batch.start: batch for batch in batches}
        now_s = self._clock()
        name = batches[0].lanes[0]
        for batch in batches:
            self._lanes[name].put(batch, now_s)
        self._wake[name].notify(len(batches))

    def _settle(self, lane: Lane, batch: Batch, results: list[BlockStatus], *, again: bool) -> None:
        """End a batch's stay in a lane: it continues, is queued again, or is reported."""
        now_s = self._clock()
        if again:
            if batch.abandoned is None:
                lane.put_back(batch)
                return
            results = batch.given_up(batch.abandoned)
        else:
            moved = results.count(_OK)
            lane.ended(batch, now_s, moved=moved, failed=batch.statuses.count(_OK) - moved)
            if lane.name in READS:
                batch.arrived = [True] * moved if moved == len(results) else [status is _OK for status in results]
        batch.statuses = results
        more = batch.hop + 1 < len(batch.lanes) and _OK in results
        if not more:
            self._report(batch)
        elif batch.abandoned is not None:
            batch.statuses = batch.given_up(batch.abandoned)
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
        self.reports.add(BatchReport(batch.plan_id, batch.start, batch.statuses, batch.arrived, batch.checksums))
