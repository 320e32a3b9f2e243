"""KV blocks in tiers: pools of slots, what lies where, and the transfers between."""

from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import (
    BlockStatus,
    DurableBackendProtocol,
    Fence,
    KVBackendProtocol,
    Move,
    Recovered,
)
from kvcontrol.kv_runtime.buddy import BuddyAllocator
from kvcontrol.kv_runtime.errors import AllocationError, ArenaError, BackendError, KvRuntimeError
from kvcontrol.kv_runtime.naive import NaiveUnits
from kvcontrol.kv_runtime.record import BlockRecord, BlockSeal, checksum
from kvcontrol.kv_runtime.refusal import NoRoom, Shortage
from kvcontrol.kv_runtime.slab import SlabAllocator

__all__ = [
    "AllocationError",
    "ArenaError",
    "BackendError",
    "BlockRecord",
    "BlockSeal",
    "BlockStatus",
    "BuddyAllocator",
    "DurableBackendProtocol",
    "Fence",
    "HostArena",
    "KVBackendProtocol",
    "KvRuntimeError",
    "Move",
    "NaiveUnits",
    "NoRoom",
    "Recovered",
    "Shortage",
    "SlabAllocator",
    "checksum",
]
