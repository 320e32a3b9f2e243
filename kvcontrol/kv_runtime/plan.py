"""Transfer plans: blocks to move, their priority, and the result of each block."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Fence
from kvcontrol.kv_runtime.record import BlockRecord

PlanId = NewType("PlanId", int)
"""A plan as one migrator numbers it; never used twice."""


class Priority(IntEnum):
    """Priority of transfers in the same direction of the same device."""

    DEMAND = 0
    """A request waits for it."""
    SAVE = 1
    """An engine's block is kept from being reused until it is done."""
    PREFETCH = 2
    """A request may come for it."""
    DEMOTION = 3
    """Nobody waits."""


class PlanRefusal(StrEnum):
    """Why a migrator doesn't take a plan."""

    QUEUE_FULL = "queue_full"
    """As many blocks wait already as may wait at this priority."""
    STALLED = "stalled"
    """The device has not finished what it was given a long time ago."""
    CLOSED = "closed"


class Route(NamedTuple):
    """One block's way: a slot of the source tier, a slot of the arena, a slot of the destination tier.

    Where source or destination is DDR, that slot is ``host`` itself. ``checksum`` is None where the block comes from
    the engine: it is taken on the way.
    """

    block_id: BlockId
    source: int
    host: int
    target: int
    record: BlockRecord
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """``routes`` from one tier to another, in the order in which they should go.

    ``deadline_s`` is a moment of the migrator's clock after which nothing of the plan begins any more. ``fence`` must
    have passed before engine memory is touched. A plan from NVMe to HBM goes through the arena slots of its routes.
    """

    src_tier: CacheTier
    dst_tier: CacheTier
    routes: tuple[Route, ...]
    priority: Priority
    deadline_s: float
    fence: Fence | None = None

    @property
    def block_ids(self) -> tuple[BlockId, ...]:
        """The blocks that the plan moves."""
        return tuple(route.block_id for route in self.routes)


class BlockResult(NamedTuple):
    """Result of one block: ``arrived`` if its bytes are in the arena and match ``checksum``.

    A block on its way to the engine may have arrived and still not be ``OK``.
    """

    status: BlockStatus
    arrived: bool
    checksum: int | None


@dataclass(slots=True)
class BatchReport:
    """The end of the plan's routes from ``start`` on; their slots belong to the caller again.

    Each of the lists is as long as the batch.
    """

    plan_id: PlanId
    start: int
    statuses: list[BlockStatus]
    arrived: list[bool]
    checksums: list[int | None]

    def __len__(self) -> int:
        return len(self.statuses)

    @property
    def all_ok(self) -> bool:
        """Whether every block is where it was wanted."""
        return self.statuses.count(BlockStatus.OK) == len(self.statuses)

    @property
    def results(self) -> list[BlockResult]:
        """Result of each block, computed at every call. O(blocks)."""
        return [BlockResult(*result) for result in zip(self.statuses, self.arrived, self.checksums, strict=True)]

    def extend(self, other: "BatchReport") -> None:
        """Take in the report of the plan's next batch."""
        self.statuses += other.statuses
        self.arrived += other.arrived
        self.checksums += other.checksums
