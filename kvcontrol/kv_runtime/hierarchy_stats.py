"""Statistics of the hierarchy, as one value."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvcontrol.core.blocks import CacheTier
from kvcontrol.kv_policy.cost_benefit import Quantity
from kvcontrol.kv_policy.migration import PathBenefits
from kvcontrol.kv_policy.prediction_error import ErrorReport
from kvcontrol.kv_runtime.backend_protocol import BlockStatus
from kvcontrol.kv_runtime.lane import LaneName, LaneStats
from kvcontrol.kv_runtime.quota import QuotaManager, TenantUsage
from kvcontrol.kv_runtime.residency import Loss
from kvcontrol.kv_runtime.ticket import Reason, TicketKind
from kvcontrol.kv_runtime.tier_space import TierSpace


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

    @classmethod
    def of(
        cls,
        space: TierSpace,
        quotas: QuotaManager,
        hits: Mapping[tuple[CacheTier, str], int],
        losses: Mapping[tuple[CacheTier, Loss], int],
    ) -> "TierStats":
        """Return one tier's, from counts over all tiers."""
        used, evictable, tier = space.slots.used, space.evictable.blocks, space.tier
        return cls(
            capacity_blocks=space.capacity_blocks,
            block_bytes=space.block_bytes,
            free_blocks=space.capacity_blocks - used,
            used_blocks=evictable,
            held_blocks=used - evictable,
            tenants=quotas.usage(tier),
            hits={tenant: blocks for (place, tenant), blocks in hits.items() if place is tier},
            losses={loss: blocks for (place, loss), blocks in losses.items() if place is tier},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyStats:
    """``outcomes`` counts blocks by what was asked and how it ended; ``skipped_writes`` those not written to NVMe.

    ``errors`` say how wrong the cost model's predictions were, ``benefits`` what was decided by it for each path.
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
    errors: Mapping[Quantity, ErrorReport]
    benefits: Mapping[tuple[CacheTier, CacheTier], PathBenefits]
