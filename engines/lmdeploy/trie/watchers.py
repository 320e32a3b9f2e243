"""The watchers of a block trie, whose reports may be deferred."""

from collections.abc import Iterator
from typing import Any

from engines.lmdeploy.trie.deferral import DeferringWatcher
from engines.lmdeploy.trie.events import tracker_of
from engines.lmdeploy.trie.eviction import eviction_of


def watchers_of(trie: Any) -> Iterator[DeferringWatcher]:
    """Yield the tracker of a trie and its eviction, if they exist."""
    for watcher in (tracker_of(trie), eviction_of(trie)):
        if watcher is not None:
            yield watcher


def settle_watchers(trie: Any) -> None:
    """Make all deferred reports of a trie, which also names its new blocks. Never raises."""
    for watcher in watchers_of(trie):
        watcher.settle_now()
