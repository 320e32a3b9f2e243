"""Shared types of the control plane. Nothing here decides anything."""

from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.errors import IdentityError, KvControlError, WireError
from kvcontrol.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvcontrol.core.hashing import chain_hashes, child_hash, root_hash, token_bytes
from kvcontrol.core.ids import BlockHash, Epoch, InstanceId, Seq

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "CacheIdentity",
    "CacheTier",
    "Epoch",
    "EventBatch",
    "IdentityError",
    "InstanceId",
    "KvControlError",
    "KvEvent",
    "Seq",
    "WireError",
    "chain_hashes",
    "child_hash",
    "root_hash",
    "token_bytes",
]
