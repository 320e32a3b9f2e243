"""KV events from LMDeploy's block trie: every node attached is a block stored, every leaf detached a block removed.

``Node.attach_to`` and ``Node.detach_leaf`` are the only two things that change the trie's shape, so what is recorded
here is what the trie holds; that covers prompt blocks, blocks that decoding filled, and blocks that a KV connector
loaded. Nodes are attached when their blocks are allocated, in the scheduling turn whose forward fills them: the moment
from which LMDeploy itself lets another request match them. The block that a sequence fills with its very last token is
not attached: LMDeploy attaches when the *next* block is needed.

A tracker belongs to one trie and is found through its roots, so two engines in one process don't mix. Nothing here
raises into the engine's loop: a failure is counted and logged, the block (and what follows it) goes unannounced.

LMDeploy 0.18 keeps its trie over ``sleep`` and over weight updates although the blocks' bytes are gone or stale, and
would serve them as prefix hits after waking. ``forget_cache`` empties it there, and says so.
"""

import logging
from collections.abc import Callable
from typing import Any

from engines.event_log import EventLog
from engines.lmdeploy.tenancy import salt_of_identity, without_salt
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.hashing import child_hash, root_hash
from kvcontrol.core.ids import BlockHash

_TRACKER = "kvgate_tracker"
_HASH = "kvgate_hash"
_MAX_ROOTS = 65_536
_ALL_BLOCKS = 1 << 62

_log = logging.getLogger(__name__)


class TrieTracker:
    """Turns changes of one trie's shape into events of one log; O(block) per change, called on the engine's thread."""

    def __init__(self, log: EventLog, identity: CacheIdentity) -> None:
        self._log = log
        self._roots: dict[tuple[str, str], BlockHash] = {}
        self.identity = identity
        self.errors = 0

    def watch(self, trie: Any) -> None:
        """Follow a ``BlockTrie`` that is still empty."""
        setattr(trie, _TRACKER, self)

    def attached(self, node: Any, parent: Any) -> None:
        """Record a node that now hangs under ``parent``; never raises."""
        try:
            adapter = node.adapter_name or ""
            known: BlockHash | None
            if parent.block_id < 0:
                known, above = None, self._root(adapter, salt_of_identity(node.extra_identity))
            else:
                known = getattr(parent, _HASH, None)
                if known is None:  # the parent's own failure was counted
                    return
                above = known
            tokens = node.token_ids.astype("<u4").tobytes()
            block = child_hash(above, tokens, extra=_extra(node.extra_identity))
            self._log.stored(block, parent=known, tokens=tokens, adapter=adapter)
            setattr(node, _HASH, block)
            setattr(node, _TRACKER, self)
        except Exception:  # noqa: BLE001  # the engine's loop dies of what escapes here
            self._failed("attaching a block")

    def detached(self, node: Any) -> None:
        """Record a node that hangs no more; never raises."""
        try:
            block = getattr(node, _HASH, None)
            if block is not None:
                self._log.removed(block)
        except Exception:  # noqa: BLE001  # likewise
            self._failed("detaching a block")

    def forgotten(self) -> None:
        """Record that the cache is empty."""
        self._log.cleared()

    def rebase(self, identity: CacheIdentity) -> None:
        """Root later blocks in another identity; the cache must be forgotten first."""
        self._roots = {}
        self.identity = identity

    def _root(self, adapter: str, salt: str) -> BlockHash:
        key = (adapter, salt)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= _MAX_ROOTS:  # many tenants came and went
                self._roots.clear()
            root = self._roots[key] = root_hash(self.identity, salt=salt, adapter=adapter)
        return root

    def _failed(self, what: str) -> None:
        self.errors += 1
        if self.errors & (self.errors - 1) == 0:  # 1st, 2nd, 4th, 8th...: a log, not a flood
            _log.exception("%s could not be announced (%d failures so far)", what, self.errors)


def evict_unused(engine: Any) -> int:
    """Evict every block of the prefix cache that no request uses, each with its event, and return how many."""
    return int(engine.scheduler.block_trie.evict(_ALL_BLOCKS))


def forget_cache(engine: Any) -> None:
    """Empty the engine's prefix cache and announce it; blocks that requests hold can't be evicted and are logged."""
    trie = engine.scheduler.block_trie
    evict_unused(engine)
    if held := len(trie.leaves):
        _log.error("%d prefix-cache paths are still held by requests; their KV is stale", held)
    tracker = getattr(trie, _TRACKER, None)
    if tracker is not None:
        tracker.forgotten()


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def trie_root(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``BlockTrie._get_or_create_root``: a root knows its trie's tracker."""

    def _get_or_create_root(self: Any, adapter_name: Any) -> Any:
        root = original(self, adapter_name)
        if not hasattr(root, _TRACKER):
            setattr(root, _TRACKER, getattr(self, _TRACKER, None))
        return root

    return _get_or_create_root


def node_attach_to(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``Node.attach_to``."""

    def attach_to(self: Any, parent: Any) -> None:
        original(self, parent)
        tracker = getattr(parent, _TRACKER, None)
        if tracker is not None:
            tracker.attached(self, parent)

    return attach_to


def node_detach_leaf(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``Node.detach_leaf``."""

    def detach_leaf(self: Any) -> bool:
        was_attached = original(self)
        if was_attached:
            tracker = getattr(self, _TRACKER, None)
            if tracker is not None:
                tracker.detached(self)
        return was_attached

    return detach_leaf


def _extra(extra_identity: tuple[Any, ...]) -> bytes:
    """What else than tokens and salt a block depends on, with every field's length: no two identities alike."""
    return b"".join(
        f"{span.start}:{span.end}:{len(span.modality)}:{span.modality}{len(span.content_hash)}:{span.content_hash}".encode()
        for span in without_salt(extra_identity)
    )


__all__ = ["TrieTracker", "evict_unused", "forget_cache", "node_attach_to", "node_detach_leaf", "trie_root"]
