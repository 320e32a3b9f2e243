"""KV blocks in tiers: pools of slots, residency, and transfers between tiers."""

from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Fence, KVBackendProtocol, Move
from kvcontrol.kv_runtime.block_file import BlockFileSpec
from kvcontrol.kv_runtime.crew import SteppedCrew, ThreadCrew
from kvcontrol.kv_runtime.errors import (
    AllocationError,
    ArenaError,
    BackendError,
    KvRuntimeError,
    QuotaError,
    RequestError,
)
from kvcontrol.kv_runtime.exchange import Berth, Lent, Short
from kvcontrol.kv_runtime.hierarchy import HierarchyManager
from kvcontrol.kv_runtime.hierarchy_config import HierarchyConfig
from kvcontrol.kv_runtime.hierarchy_stats import HierarchyStats
from kvcontrol.kv_runtime.lane import LaneName
from kvcontrol.kv_runtime.migrator import KVMigrator
from kvcontrol.kv_runtime.migrator_config import MigratorConfig
from kvcontrol.kv_runtime.plan import BatchReport, MigrationPlan, PlanId, PlanRefusal, Priority, Route
from kvcontrol.kv_runtime.prompt import Prompt
from kvcontrol.kv_runtime.quota import NO_QUOTA, QuotaManager, TenantQuota
from kvcontrol.kv_runtime.record import BlockRecord, BlockSeal, Recovered, checksum
from kvcontrol.kv_runtime.refusal import NoSpace, Shortage
from kvcontrol.kv_runtime.residency import Loss
from kvcontrol.kv_runtime.slab import SlabAllocator
from kvcontrol.kv_runtime.ticket import Change, Finished, Reason, SaveRequest, TicketId, TicketKind

__all__ = [
    "NO_QUOTA",
    "AllocationError",
    "ArenaError",
    "BackendError",
    "BatchReport",
    "Berth",
    "BlockFileSpec",
    "BlockRecord",
    "BlockSeal",
    "BlockStatus",
    "Change",
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
    "Lent",
    "Loss",
    "MigrationPlan",
    "MigratorConfig",
    "Move",
    "NoSpace",
    "PlanId",
    "PlanRefusal",
    "Priority",
    "Prompt",
    "QuotaError",
    "QuotaManager",
    "Reason",
    "Recovered",
    "RequestError",
    "Route",
    "SaveRequest",
    "Short",
    "Shortage",
    "SlabAllocator",
    "SteppedCrew",
    "TenantQuota",
    "ThreadCrew",
    "TicketId",
    "TicketKind",
    "checksum",
]
