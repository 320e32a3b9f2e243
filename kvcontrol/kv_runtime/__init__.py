"""KV blocks in tiers: pools of slots, residency, and transfers between tiers."""

from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import (
    BlockStatus,
    DurableBackendProtocol,
    EngineBackendProtocol,
    Fence,
    KVBackendProtocol,
    Move,
)
from kvcontrol.kv_runtime.block_file import BlockFileSpec
from kvcontrol.kv_runtime.crew import Crew, SteppedCrew, ThreadCrew
from kvcontrol.kv_runtime.demoter import WriteMode
from kvcontrol.kv_runtime.errors import (
    AllocationError,
    ArenaError,
    BackendError,
    BlockFileError,
    KvRuntimeError,
    QuotaError,
    RequestError,
)
from kvcontrol.kv_runtime.exchange import Berth, Exchange, Lent, Short, Standing
from kvcontrol.kv_runtime.hierarchy import HierarchyManager
from kvcontrol.kv_runtime.hierarchy_config import HierarchyConfig
from kvcontrol.kv_runtime.hierarchy_stats import HierarchyStats, TierStats
from kvcontrol.kv_runtime.lane import LaneName, LaneStats
from kvcontrol.kv_runtime.migrator import KVMigrator
from kvcontrol.kv_runtime.migrator_config import MigratorConfig
from kvcontrol.kv_runtime.plan import BatchReport, BlockResult, MigrationPlan, PlanId, PlanRefusal, Priority, Route
from kvcontrol.kv_runtime.prompt import Prompt
from kvcontrol.kv_runtime.quota import NO_QUOTA, QuotaManager, TenantQuota, TenantUsage
from kvcontrol.kv_runtime.record import BlockRecord, BlockSeal, Recovered, checksum
from kvcontrol.kv_runtime.refusal import NoSpace, Shortage
from kvcontrol.kv_runtime.residency import Loss
from kvcontrol.kv_runtime.slab import SlabAllocator
from kvcontrol.kv_runtime.ticket import (
    Change,
    Finished,
    Outcome,
    Progress,
    Reason,
    SaveRequest,
    SaveTicket,
    TicketId,
    TicketKind,
)
from kvcontrol.kv_runtime.tier_space import Watermarks

__all__ = [
    "NO_QUOTA",
    "AllocationError",
    "ArenaError",
    "BackendError",
    "BatchReport",
    "Berth",
    "BlockFileError",
    "BlockFileSpec",
    "BlockRecord",
    "BlockResult",
    "BlockSeal",
    "BlockStatus",
    "Change",
    "Crew",
    "DurableBackendProtocol",
    "EngineBackendProtocol",
    "Exchange",
    "Fence",
    "Finished",
    "HierarchyConfig",
    "HierarchyManager",
    "HierarchyStats",
    "HostArena",
    "KVBackendProtocol",
    "KVMigrator",
    "KvRuntimeError",
    "LaneName",
    "LaneStats",
    "Lent",
    "Loss",
    "MigrationPlan",
    "MigratorConfig",
    "Move",
    "NoSpace",
    "Outcome",
    "PlanId",
    "PlanRefusal",
    "Priority",
    "Progress",
    "Prompt",
    "QuotaError",
    "QuotaManager",
    "Reason",
    "Recovered",
    "RequestError",
    "Route",
    "SaveRequest",
    "SaveTicket",
    "Short",
    "Shortage",
    "SlabAllocator",
    "Standing",
    "SteppedCrew",
    "TenantQuota",
    "TenantUsage",
    "ThreadCrew",
    "TicketId",
    "TicketKind",
    "TierStats",
    "Watermarks",
    "WriteMode",
    "checksum",
]
