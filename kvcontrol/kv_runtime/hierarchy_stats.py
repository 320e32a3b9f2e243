"""What the hierarchy knows of itself, as one value."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_runtime.backend_protocol import BlockStatus
from kvcontrol.kv_runtime.lane import LaneName, LaneStats
from kvcontrol.kv_runtime.quota import TenantUsage
from kvcontrol.kv_runtime.residency import Loss
from kvcontrol.kv_runtime.ticket import Reason, TicketKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """``used_blocks`` can be evicted, ``held_blocks`` can't (held, or a transfer uses or fills the slot).

    ``free + used + held == capacity``. ``hits`` counts blocks that loads found here, by tenant.
    """

    capacity_blocks: int
    block_bytes: int
    free_blocks: int
    used_blocks: int
    held_blocks: int
    tenants: Mapping[str, TenantUsage]
    hits: Mapping[str, int]
    losses: Mapping[Loss, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyStats:
    """``outcomes`` counts blocks by what was asked and how it ended; ``skipped_writes`` those not written to NVMe.

    ``worker_faults`` > 0 says that a backend or the runtime itself has a bug.
    """

    tiers: Mapping[CacheTier, TierStats]
    lanes: Mapping[LaneName, LaneStats]
    outcomes: Mapping[tuple[TicketKind, BlockStatus, Reason], int]
    skipped_writes: Mapping[str, int]
    due_writes: int
    open_tickets: int
    collisions: int
    worker_faults: int


__all__ = ["HierarchyStats", "TierStats"]
