"""KV events from LMDeploy's block trie: every node attached is a block stored, every leaf detached a block removed.

``Node.attach_to`` and ``Node.detach_leaf`` are the only two things that change the trie's shape, and they are called
from ``BlockTrie._extend_trie_path`` and ``BlockTrie.evict`` alone, so what is recorded here is what the trie holds;
that covers prompt blocks, blocks that decoding filled, and blocks that a KV connector loaded. Nodes are attached when
their blocks are allocated, in the scheduling turn whose forward fills them: the moment from which LMDeploy itself lets
another request match them. The block that a sequence fills with its very last token is not attached: LMDeploy attaches
when the *next* block is needed.

A tracker belongs to one trie and is found through its roots, so two engines in one process don't mix. Nothing here
raises into the engine's loop: a failure is counted and logged, the block (and what follows it) goes unannounced.

LMDeploy 0.18 keeps its trie over ``sleep`` and over weight updates although the blocks' bytes are gone or stale, and
would serve them as prefix hits after waking. ``forget_cache`` empties it there, and says so.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from itertools import groupby
from typing import Any, Protocol

from engines.events.log import EventLog
from engines.lmdeploy.trie.block_names import HASH, NamedPath, PathNames
from engines.lmdeploy.trie.deferral import DeferringWatcher
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.ids import BlockHash

_TRACKER = "kvgate_tracker"
_ALL_BLOCKS = 1 << 62

_log = logging.getLogger(__name__)


class StoredWitness(Protocol):
    """Whoever must act on a block as soon as the trie has it. Never raises."""

    def stored(self, nodes: list[Any], keys: list[BlockHash]) -> None:
        """Follow nodes that hang in the trie now, by their hashes."""


class TrieTracker(DeferringWatcher):
    """Turns changes of one trie's shape into events of one log, on the engine's thread.

    LMDeploy changes the trie a path at a time, while a request waits. So the tracker only notes each change, and names
    and reports the changes of a path together when the path is complete (``settle``): a third of the cost of one by
    one. A deferral delays the reports (``deferral.py``).
    """

    def __init__(self, log: EventLog, identity: CacheIdentity) -> None:
        super().__init__()
        self._log = log
        self._names = PathNames(identity)
        self._changes: list[tuple[Any, Any]] = []
        """Nodes with their new parent, None for removed nodes."""
        self._gained = False
        """Whether pending changes contain inserted nodes."""
        self.witness: StoredWitness | None = None
        self.errors = 0

    @property
    def identity(self) -> CacheIdentity:
        """What the keys of later blocks are rooted in."""
        return self._names.identity

    def watch(self, trie: Any) -> None:
        """Follow a ``BlockTrie`` that is still empty."""
        setattr(trie, _TRACKER, self)

    def attached(self, node: Any, parent: Any) -> None:
        """Note a node that now hangs under ``parent``; O(1)."""
        setattr(node, _TRACKER, self)
        self._gained = True
        self._changes.append((node, parent))

    def detached(self, node: Any) -> None:
        """Note a removed node; O(1)."""
        self._changes.append((node, None))

    def named(self, nodes: list[Any], parent: Any) -> NamedPath | None:
        """Name a path that may be inserted below ``parent`` later, so that its report is quick; None if that fails.

        Each node is the parent of the next, and gets its name and a reference to this tracker. The trie is unchanged.
        Pending reports are made first. Never raises.
        """
        self.settle_now()
        try:
            named = self._names.named(nodes, parent)
            for node, (key, _, _) in zip(nodes, () if named is None else named.blocks, strict=False):
                setattr(node, HASH, key)
                setattr(node, _TRACKER, self)
        except Exception:  # noqa: BLE001  # the engine's loop dies of what escapes here
            self._failed()
            return None
        return named

    def hung(self, nodes: list[Any], parent: Any, named: NamedPath | None) -> None:
        """Note a whole path that was inserted below ``parent``. Never raises."""
        if named is None or named.identity is not self.identity:
            named = None
            for node in nodes:  # drop a name under a former identity
                node.__dict__.pop(HASH, None)
                setattr(node, _TRACKER, self)
        self._gained = True
        self._set_down()
        self._pending.append(partial(self._guarded, self._report_linked, nodes, parent, named))
        self.settle()

    @property
    def has_pending(self) -> bool:
        return bool(self._changes or self._pending)

    def settle_before_eviction(self) -> None:
        """Record nodes inserted since the last call: the witness may protect them from eviction."""
        if self._gained:
            self.settle_now()

    def settle_now(self) -> None:
        """Record all changes since the last call, deferred or not; O(changed blocks). Never raises."""
        self._set_down()
        self._gained = False
        super().settle_now()

    def forgotten(self) -> None:
        """Record that the cache is empty."""
        self.settle_now()
        self._log.cleared()

    def rebase(self, identity: CacheIdentity) -> None:
        """Root later blocks in another identity; the cache must be forgotten first."""
        self.settle_now()
        self._names = PathNames(identity)

    def _report_removed(self, nodes: list[Any]) -> None:
        known = [block for node in nodes if (block := getattr(node, HASH, None)) is not None]
        if known:
            self._log.removed_all(known, tier=CacheTier.HBM)

    def _set_down(self) -> None:
        """Turn the noted changes into pending reports, in order."""
        changes, self._changes = self._changes, []
        for is_gone, run in groupby(changes, key=lambda change: change[1] is None):
            if is_gone:
                self._pending.append(partial(self._guarded, self._report_removed, [node for node, _ in run]))
            else:
                self._pending += [partial(self._guarded, self._report_stored, path) for path in _paths(run)]

    def _guarded(self, report: Callable[..., None], *args: Any) -> None:
        try:
            report(*args)
        except Exception:  # noqa: BLE001  # the engine's loop dies of what escapes here
            self._failed()

    def _report_linked(self, nodes: list[Any], parent: Any, named: NamedPath | None) -> None:
        if named is None:
            named = self._names.named(nodes, parent)
        if named is not None:
            self._report_named(nodes, named)

    def _report_stored(self, path: list[tuple[Any, Any]]) -> None:
        """Record a run of nodes, each the parent of the next."""
        nodes = [node for node, _ in path]
        named = self._names.named(nodes, path[0][1])
        if named is not None:
            self._report_named(nodes, named)

    def _report_named(self, nodes: list[Any], named: NamedPath) -> None:
        self._log.stored_all(named.blocks, tier=CacheTier.HBM, adapter=named.adapter)
        for node, (key, _, _) in zip(nodes, named.blocks, strict=True):
            setattr(node, HASH, key)
        if self.witness is not None:
            self.witness.stored(nodes, [key for key, _, _ in named.blocks])

    def _failed(self) -> None:
        self.errors += 1
        if self.errors & (self.errors - 1) == 0:  # 1st, 2nd, 4th, 8th...: a log, not a flood
            _log.exception("a change of the prefix cache could not be announced (%d failures so far)", self.errors)


def hash_of(node: Any) -> BlockHash | None:
    """Return what a node's block is called outside, None where that could not be worked out."""
    key: BlockHash | None = getattr(node, HASH, None)
    return key


def tracker_of(trie: Any) -> TrieTracker | None:
    """Return who follows a ``BlockTrie``, None where nobody does."""
    tracker: TrieTracker | None = getattr(trie, _TRACKER, None)
    return tracker


def _paths(run: Iterable[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
    """Cut nodes with their parents wherever one isn't the child of the one before it."""
    path: list[tuple[Any, Any]] = []
    for node, parent in run:
        if path and path[-1][0] is not parent:
            yield path
            path = []
        path.append((node, parent))
    if path:
        yield path


def evict_unused(trie: Any) -> int:
    """Evict every block of the prefix cache that nobody uses, each with its event, and return how many."""
    return int(trie.evict(_ALL_BLOCKS))


def forget_cache(engine: Any) -> None:
    """Empty the engine's prefix cache and announce it; blocks that requests hold can't be evicted and are logged."""
    trie = engine.scheduler.block_trie
    evict_unused(trie)
    if held := len(trie.leaves):
        _log.error("%d prefix-cache paths are still held by requests; their KV is stale", held)
    tracker = tracker_of(trie)
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


def trie_change(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ``BlockTrie`` after which a change of its shape is complete: it is told."""

    @wraps(original)
    def change(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return original(self, *args, **named)
        finally:
            tracker = tracker_of(self)
            if tracker is not None:
                tracker.settle()

    return change


def trie_evict(original: Callable[[Any, int], int]) -> Callable[[Any, int], int]:
    """``BlockTrie.evict``: who may keep blocks knows all of them first; what has gone is told."""

    @wraps(original)
    def evict(self: Any, max_num_blocks: int) -> int:
        tracker = tracker_of(self)
        if tracker is None:
            return original(self, max_num_blocks)
        tracker.settle_before_eviction()
        try:
            return original(self, max_num_blocks)
        finally:
            tracker.settle()

    return evict
