"""What takes the place of LMDeploy's symbols so that a policy is told of the trie and chooses (tables: ``hooks/``)."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from engines.lmdeploy.trie.eviction import EVICTION, TrieEviction, eviction_of
from kvcontrol.kv_policy import LruPolicy

_log = logging.getLogger(__name__)


def memory_init(original: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    """``LogicalMemory.__init__``: access times keep their fractions of seconds."""

    def __init__(self: Any, num_blocks: int) -> None:  # noqa: N807  # called by this name
        original(self, num_blocks)
        self.access_time = self.access_time.astype(np.float64)

    return __init__


def lifecycle_init(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """``KVBlockLifecycle.__init__``: a trie gets its ``TrieEviction``, found through its allocator."""

    def __init__(self: Any, allocator: Any, state_checkpoints: Any) -> None:  # noqa: N807
        original(self, allocator, state_checkpoints)
        if state_checkpoints._state_checkpoints_enabled:  # noqa: SLF001
            _log.warning("this model keeps recurrent state: LMDeploy's own eviction chooses what leaves the trie")
        else:
            setattr(allocator, EVICTION, TrieEviction(allocator, LruPolicy()))

    return __init__


def lifecycle_commit(original: Callable[..., None]) -> Callable[..., None]:
    """``KVBlockLifecycle.commit_path_extension``: blocks became reusable."""

    def commit_path_extension(self: Any, node: Any, ref_blocks: list[int], free_blocks: list[int]) -> None:
        original(self, node, ref_blocks, free_blocks)
        eviction = getattr(self.allocator, EVICTION, None)
        if eviction is not None:
            eviction.committed(node)

    return commit_path_extension


def lifecycle_evict(original: Callable[[Any, int], int]) -> Callable[[Any, int], int]:
    """``KVBlockLifecycle.evict``: the policy chooses; LMDeploy's own does where there is none, or after an error."""

    def evict(self: Any, max_num_blocks: int) -> int:
        eviction = getattr(self.allocator, EVICTION, None)
        if eviction is None or eviction.failed:
            return original(self, max_num_blocks)
        freed: int = eviction.evict(self.leaves, max_num_blocks)
        if eviction.failed:
            freed += original(self, max_num_blocks - freed)
        return freed

    return evict


def allocator_add_ref_count(original: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """``LogicalAllocator.add_ref_count``, through which every reference but a block's first comes and goes."""

    def add_ref_count(self: Any, blocks: Any, value: Any) -> None:
        original(self, blocks, value)
        eviction = getattr(self, EVICTION, None)
        if eviction is not None:
            eviction.references_changed(blocks)

    return add_ref_count


def trie_finalize_match(original: Any) -> Any:
    """``BlockTrie.finalize_match``: a match was accepted (the tentative ones before it may have been many)."""
    function = original.__func__

    def finalize_match(seq: Any) -> None:
        eviction = getattr(seq.prefix_cache.trie_cursor, EVICTION, None)
        if eviction is not None:
            eviction.matched(seq)
        function(seq)

    return staticmethod(finalize_match)


def trie_allocate(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``BlockTrie.allocate``: the blocks of an admitted request are about to become reusable."""

    def allocate(self: Any, seq: Any) -> None:
        eviction = eviction_of(self)
        if eviction is not None:
            eviction.requested(self, seq)
        original(self, seq)

    return allocate
