"""Who watches a block trie, and may be told of it later."""

from collections.abc import Iterator
from typing import Any

from engines.lmdeploy.trie.deferral import TellsLater
from engines.lmdeploy.trie.events import tracker_of
from engines.lmdeploy.trie.eviction import eviction_of


def watchers_of(trie: Any) -> Iterator[TellsLater]:
    """Yield them: who tells of its changes, and who chooses its victims, as far as there are such."""
    for watcher in (tracker_of(trie), eviction_of(trie)):
        if watcher is not None:
            yield watcher


def tell_watchers(trie: Any) -> None:
    """Have them told of all that was put off: blocks without a name yet get theirs. Never raises."""
    for watcher in watchers_of(trie):
        watcher.settle_now()


__all__ = ["tell_watchers", "watchers_of"]
