"""KV blocks in tiers: pools of slots, what lies where, and the transfers between."""

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
from kvcontrol.kv_runtime.block_manager import BlockCopy, BlockManager, BlockTable, Extension, RequestState, Resumption
from kvcontrol.kv_runtime.buddy import BuddyAllocator
from kvcontrol.kv_runtime.crew import Crew, SteppedCrew, ThreadCrew
from kvcontrol.kv_runtime.defrag import Compactor, Relocation
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
from kvcontrol.kv_runtime.naive import NaivePool, NaiveTokens, NaiveUnits
from kvcontrol.kv_runtime.plan import BatchReport, BlockResult, MigrationPlan, PlanId, PlanRefusal, Priority, Route
from kvcontrol.kv_runtime.pool import AllocationResult, KVPool, Mark
from kvcontrol.kv_runtime.prompt import Prompt
from kvcontrol.kv_runtime.quota import NO_QUOTA, QuotaManager, TenantQuota, TenantUsage
from kvcontrol.kv_runtime.record import BlockRecord, BlockSeal, Recovered, checksum
from kvcontrol.kv_runtime.refusal import NoRoom, Shortage
from kvcontrol.kv_runtime.residency import Loss
from kvcontrol.kv_runtime.slab import SlabAllocator
from kvcontrol.kv_runtime.slot_layout import SlotLayout
from kvcontrol.kv_runtime.space import BlockRegion, BlockSpace, BlockSpec, PlacedBlock, SlotSpace
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
from kvcontrol.kv_runtime.usage import Fragmentation, Utilization

__all__ = [
    "NO_QUOTA",
    "AllocationError",
    "AllocationResult",
    "ArenaError",
    "BackendError",
    "BatchReport",
    "Berth",
    "BlockCopy",
    "BlockFileError",
    "BlockFileSpec",
    "BlockManager",
    "BlockRecord",
    "BlockRegion",
    "BlockResult",
    "BlockSeal",
    "BlockSpace",
    "BlockSpec",
    "BlockStatus",
    "BlockTable",
    "BuddyAllocator",
    "Change",
    "Compactor",
    "Crew",
    "DurableBackendProtocol",
    "EngineBackendProtocol",
    "Exchange",
    "Extension",
    "Fence",
    "Finished",
    "Fragmentation",
    "HierarchyConfig",
    "HierarchyManager",
    "HierarchyStats",
    "HostArena",
    "KVBackendProtocol",
    "KVMigrator",
    "KVPool",
    "KvRuntimeError",
    "LaneName",
    "LaneStats",
    "Lent",
    "Loss",
    "Mark",
    "MigrationPlan",
    "MigratorConfig",
    "Move",
    "NaivePool",
    "NaiveTokens",
    "NaiveUnits",
    "NoRoom",
    "Outcome",
    "PlacedBlock",
    "PlanId",
    "PlanRefusal",
    "Priority",
    "Progress",
    "Prompt",
    "QuotaError",
    "QuotaManager",
    "Reason",
    "Recovered",
    "Relocation",
    "RequestError",
    "RequestState",
    "Resumption",
    "Route",
    "SaveRequest",
    "SaveTicket",
    "Short",
    "Shortage",
    "SlabAllocator",
    "SlotLayout",
    "SlotSpace",
    "Standing",
    "SteppedCrew",
    "TenantQuota",
    "TenantUsage",
    "ThreadCrew",
    "TicketId",
    "TicketKind",
    "TierStats",
    "Utilization",
    "Watermarks",
    "WriteMode",
    "checksum",
]
