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
from kvcontrol.kv_runtime.buddy import BuddyAllocator
from kvcontrol.kv_runtime.errors import AllocationError, ArenaError, BackendError, BlockFileError, KvRuntimeError
from kvcontrol.kv_runtime.naive import NaivePool, NaiveUnits
from kvcontrol.kv_runtime.pool import AllocationResult, Fragmentation, KVPool, Utilization
from kvcontrol.kv_runtime.record import BlockRecord, BlockSeal, Recovered, checksum
from kvcontrol.kv_runtime.refusal import NoRoom, Shortage
from kvcontrol.kv_runtime.slab import SlabAllocator
from kvcontrol.kv_runtime.space import BlockRegion, BlockSpace, BlockSpec, PlacedBlock, SlotSpace

__all__ = [
    "AllocationError",
    "AllocationResult",
    "ArenaError",
    "BackendError",
    "BlockFileError",
    "BlockFileSpec",
    "BlockRecord",
    "BlockRegion",
    "BlockSeal",
    "BlockSpace",
    "BlockSpec",
    "BlockStatus",
    "BuddyAllocator",
    "DurableBackendProtocol",
    "EngineBackendProtocol",
    "Fence",
    "Fragmentation",
    "HostArena",
    "KVBackendProtocol",
    "KVPool",
    "KvRuntimeError",
    "Move",
    "NaivePool",
    "NaiveUnits",
    "NoRoom",
    "PlacedBlock",
    "Recovered",
    "Shortage",
    "SlabAllocator",
    "SlotSpace",
    "Utilization",
    "checksum",
]
