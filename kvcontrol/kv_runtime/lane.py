"""One direction of one device: waiting batches, running batches, and measured speed.

A lane is the place of queueing, because directions don't share bandwidth (links are full duplex) and devices don't
share anything. Not thread-safe: the migrator's lock guards it.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, KVBackendProtocol
from kvcontrol.kv_runtime.bandwidth import Bandwidth
from kvcontrol.kv_runtime.plan import MigrationPlan, PlanId, Priority, Route


class LaneName(StrEnum):
    """A direction, as operators read it."""

    HBM_TO_DDR = "hbm_to_ddr"
    DDR_TO_HBM = "ddr_to_hbm"
    DDR_TO_NVME = "ddr_to_nvme"
    NVME_TO_DDR = "nvme_to_ddr"


LANES_OF: Final[dict[tuple[CacheTier, CacheTier], tuple[LaneName, ...]]] = {
    (CacheTier.HBM, CacheTier.DDR): (LaneName.HBM_TO_DDR,),
    (CacheTier.DDR, CacheTier.HBM): (LaneName.DDR_TO_HBM,),
    (CacheTier.DDR, CacheTier.NVME): (LaneName.DDR_TO_NVME,),
    (CacheTier.NVME, CacheTier.DDR): (LaneName.NVME_TO_DDR,),
    (CacheTier.NVME, CacheTier.HBM): (LaneName.NVME_TO_DDR, LaneName.DDR_TO_HBM),
}
"""The lanes that a plan takes, in order."""


class Batch:
    """A bounded part of a plan that one thread carries through one lane.

    Without a plan it erases durable slots instead.
    """

    __slots__ = (
        "abandoned",
        "arrived",
        "checksums",
        "erase",
        "hop",
        "lanes",
        "plan",
        "plan_id",
        "priority",
        "queued",
        "routes",
        "start",
        "statuses",
        "waiting_since_s",
    )

    def __init__(
        self,
        *,
        plan_id: PlanId,
        plan: MigrationPlan | None,
        start: int,
        routes: tuple[Route, ...],
        erase: tuple[int, ...] = (),
    ) -> None:
        self.plan_id = plan_id
        self.plan = plan
        self.start = start
        self.routes = routes
        self.erase = erase
        self.lanes = (LaneName.DDR_TO_NVME,) if plan is None else LANES_OF[plan.src_tier, plan.dst_tier]
        self.priority = Priority.DEMOTION if plan is None else plan.priority
        self.hop = 0
        self.queued = False
        self.abandoned: BlockStatus | None = None
        self.statuses = [BlockStatus.OK] * (len(routes) or len(erase))
        self.arrived = [False] * len(self.statuses)
        self.checksums: list[int | None] = [route.checksum for route in routes] or [None] * len(erase)
        self.waiting_since_s = 0.0

    def given_up(self, status: BlockStatus) -> list[BlockStatus]:
        """Return its statuses, with ``status`` for blocks that had not failed before."""
        ok = BlockStatus.OK
        return [status if before is ok else before for before in self.statuses]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStats:
    """``bandwidth`` is of the lane's busy time lately, None before the first sample; times are averages too."""

    name: LaneName
    queued_blocks: int
    running_blocks: int
    moved_blocks: int
    moved_bytes: int
    failed_blocks: int
    bandwidth_bytes_per_s: float | None
    wait_s: float
    batch_s: float
    oldest_running_s: float


_WEIGHT: Final = 0.2
"""Of the newest sample in every average."""


class Lane:
    """A queue for each priority, the running batches, and the measurements."""

    def __init__(self, name: LaneName, backend: KVBackendProtocol) -> None:
        self.name = name
        self.backend = backend
        self.queued_blocks = [0] * len(Priority)
        self.running: dict[Batch, float] = {}
        self._bandwidth = Bandwidth()
        self._queues: list[deque[Batch]] = [deque() for _ in Priority]
        self._moved_blocks = 0
        self._moved_bytes = 0
        self._failed_blocks = 0
        self._wait_s = 0.0
        self._batch_s = 0.0

    def put(self, batch: Batch, now_s: float) -> None:
        """Queue a batch behind those of its priority."""
        batch.queued = True
        batch.waiting_since_s = now_s
        self._queues[batch.priority].append(batch)
        self.queued_blocks[batch.priority] += len(batch.statuses)

    def put_back(self, batch: Batch) -> None:
        """Queue a batch again that could not begin yet; its waiting time continues."""
        batch.queued = True
        self._queues[batch.priority].append(batch)
        self.queued_blocks[batch.priority] += len(batch.statuses)

    def withdraw(self, batch: Batch) -> None:
        """Take a queued batch out of the queue, O(1): its place is skipped later."""
        batch.queued = False
        self.queued_blocks[batch.priority] -= len(batch.statuses)

    def hurry(self, batch: Batch, priority: Priority) -> None:
        """Move a queued batch to a more urgent queue, O(1)."""
        self.queued_blocks[batch.priority] -= len(batch.statuses)
        batch.priority = priority
        self._queues[priority].append(batch)
        self.queued_blocks[priority] += len(batch.statuses)

    def take(self) -> Batch | None:
        """Remove and return the most urgent batch, the oldest among its like; None when nothing waits."""
        for priority, queue in zip(Priority, self._queues, strict=True):
            while queue:
                batch = queue.popleft()
                # withdrawn, hurried, or carried on to its next lane: what stands here is an old place of it
                if batch.queued and batch.priority is priority and batch.lanes[batch.hop] is self.name:
                    batch.queued = False
                    self.queued_blocks[priority] -= len(batch.statuses)
                    return batch
        return None

    def began(self, batch: Batch, now_s: float) -> None:
        """A batch's transfer begins."""
        if not self.running:
            self._bandwidth.busy(now_s)
        self.running[batch] = now_s
        self._wait_s += _WEIGHT * (now_s - batch.waiting_since_s - self._wait_s)

    def ended(self, batch: Batch, now_s: float, *, moved: int, failed: int) -> None:
        """A batch's stay is over, with so many blocks moved and failed."""
        began_s = self.running.pop(batch, None)
        self._failed_blocks += failed
        if began_s is None or batch.erase:
            return  # late before it began, or no transfer: that says nothing of the device's speed
        size = moved * self.backend.block_bytes
        self._moved_blocks += moved
        self._moved_bytes += size
        self._bandwidth.ended(size, now_s, at_rest=not self.running)
        if moved:
            self._batch_s += _WEIGHT * (now_s - began_s - self._batch_s)

    def bandwidth(self, now_s: float) -> float | None:
        """Return the speed to count on, in bytes/s; None before anything was measured."""
        running = sum(len(batch.statuses) for batch in self.running)
        return self._bandwidth.bytes_per_s(now_s, running * self.backend.block_bytes)

    def oldest_running_s(self, now_s: float) -> float:
        """Return for how long the longest-running batch has been on the device."""
        return now_s - min(self.running.values(), default=now_s)

    def stats(self, now_s: float) -> LaneStats:
        """Return the lane's statistics."""
        return LaneStats(
            name=self.name,
            queued_blocks=sum(self.queued_blocks),
            running_blocks=sum(len(batch.statuses) for batch in self.running),
            moved_blocks=self._moved_blocks,
            moved_bytes=self._moved_bytes,
            failed_blocks=self._failed_blocks,
            bandwidth_bytes_per_s=self.bandwidth(now_s),
            wait_s=self._wait_s,
            batch_s=self._batch_s,
            oldest_running_s=self.oldest_running_s(now_s),
        )
