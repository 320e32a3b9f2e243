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
from kvcontrol.kv_runtime.errors import ArenaError, BackendError, KvRuntimeError
from kvcontrol.kv_runtime.record import BlockRecord, BlockSeal, checksum

__all__ = [
    "ArenaError",
    "BackendError",
    "BlockRecord",
    "BlockSeal",
    "BlockStatus",
    "DurableBackendProtocol",
    "Fence",
    "HostArena",
    "KVBackendProtocol",
    "KvRuntimeError",
    "Move",
    "Recovered",
    "checksum",
]
