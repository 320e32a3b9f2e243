"""Shared types of the control plane. Nothing here decides anything."""

from kvcontrol.core.blocks import CacheIdentity, CacheTier, KVBlockHandle, KVBlockInfo, KVFormat
from kvcontrol.core.errors import IdentityError, KvControlError, WireError
from kvcontrol.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvcontrol.core.hashing import chain_hashes, child_hash, root_hash, token_bytes
from kvcontrol.core.ids import BlockHash, BlockId, Epoch, InstanceId, Seq

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockId",
    "BlockRemoved",
    "BlockStored",
    "CacheIdentity",
    "CacheTier",
    "Epoch",
    "EventBatch",
    "IdentityError",
    "InstanceId",
    "KVBlockHandle",
    "KVBlockInfo",
    "KVFormat",
    "KvControlError",
    "KvEvent",
    "Seq",
    "WireError",
    "chain_hashes",
    "child_hash",
    "root_hash",
    "token_bytes",
]
