"""Prefixes in LMDeploy's trie by the hashes that they are called by outside: found, and taken out.

Whoever asks is an operator, so finding is a walk over the whole trie (about 10 ms for 100,000 blocks) rather than one
more table that every change of it would have to keep. The engine's thread.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from engines.lmdeploy.trie.events import hash_of
from engines.lmdeploy.trie.watchers import settle_watchers
from kvcontrol.core.ids import BlockHash


def find_nodes(trie: Any, keys: Collection[BlockHash]) -> dict[BlockHash, Any]:
    """Return the nodes of those blocks that the trie has. O(blocks of the trie)."""
    if not keys:
        return {}
    settle_watchers(trie)
    return {key: node for node in _all(trie._roots.values()) if (key := hash_of(node)) in keys and key is not None}  # noqa: SLF001


def path_above(node: Any) -> list[BlockHash]:
    """Return the hashes of what comes before a node, from the beginning of the prompt on."""
    keys = [hash_of(each) for each in node.path_from_root()[:-1]]
    return [key for key in keys if key is not None]


def with_what_follows(nodes: Iterable[Any]) -> list[Any]:
    """Return nodes and all that hangs below them, each once, heads before tails."""
    return list({id(each): each for node in nodes for each in (node, *_all((node,)))}.values())


def take_out(trie: Any, nodes: Iterable[Any]) -> tuple[int, int]:
    """Free the blocks of nodes and of all that hangs below them, but for what somebody uses and what comes before that.

    Returns how many were freed and how many stay. Each is announced, and whoever chooses victims is told: first of what
    hangs, since that is followed up from its tail, and some of it may be to stay.
    """
    settle_watchers(trie)
    lifecycle = trie._kv_lifecycle  # noqa: SLF001
    states, leaves, references = lifecycle.state_checkpoints, lifecycle.leaves, trie.allocator.get_ref_count
    sought = with_what_follows(nodes)
    freed = []
    for node in sorted(sought, key=lambda each: each.prefix_len, reverse=True):
        if node.children or not node.is_attached() or states.is_pinned(node) or references(node.block_id) != 1:
            continue
        parent = node.parent
        states.release_checkpoint(node)
        node.detach_leaf()
        leaves.discard(node)
        if parent.parent is not None and not parent.children:
            leaves.add(parent)
        freed.append(node.block_id)
    if freed:
        trie.allocator.free(np.array(freed))
    settle_watchers(trie)
    return len(freed), sum(node.is_attached() for node in sought)


def _all(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        for child in waiting.pop().children.values():
            yield child
            if child.children:
                waiting.append(child)
