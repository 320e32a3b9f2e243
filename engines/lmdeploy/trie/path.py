"""Paths of LMDeploy's block trie that are made while their blocks are still being loaded.

When a load has ended, LMDeploy hangs its blocks into the trie one by one: hash, look up, make a node, tell of it. For
100,000 tokens that keeps the prompt waiting for tens of milliseconds, just after the engine's thread had nothing to do
for as long. So the nodes are made in that time, in slices, linked with each other and with nothing else; once the load
has ended the first of them is hung up, and the rest with it.

A path is for one request, one parent, and the blocks that the request had when it began. It is used only while all that
still holds; else LMDeploy does it block by block, as without it. Its nodes are what LMDeploy itself would have made,
from the same calls. One thread, the engine's.
"""

import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from engines.control.guard import Guard
from engines.lmdeploy.trie.contents import content_of
from engines.lmdeploy.trie.events import tracker_of
from engines.lmdeploy.trie.eviction import EVICTION, eviction_of

_PATH = "kvgate_path"
SLICE_BLOCKS = 64
"""Made at a time, in about half a millisecond: whoever asks for a slice looks in between whether a load has ended."""
GRACE_S = 0.005
"""How long a load has the interpreter to itself, to be started by other threads, before its path is made."""


class TriePath:
    """The blocks of ``seq`` from its trie cursor to ``last_block`` (exclusive), as nodes that hang nowhere yet."""

    def __init__(self, trie: Any, seq: Any, last_block: int, *, guard: Guard) -> None:
        cursor = seq.prefix_cache.trie_cursor
        self._guard = guard
        self._trie, self._seq, self._last = trie, seq, last_block
        self._parent = trie._get_or_create_root(seq.adapter_name) if cursor is None else cursor  # noqa: SLF001
        self._first = self._parent.prefix_len // trie.block_size
        self._nodes: list[Any] = []
        self._blocks: list[int] = []
        self._named: Any = None
        self._left = self._make()

    def work(self) -> bool:
        """Make a slice of what is left and return whether something is left after it."""
        return next(self._left, False)

    def hang(self, node: Any, num_complete_blocks: int) -> Any | None:
        """Hang the path below ``node`` and return its last node; None, with nothing changed, where it doesn't fit."""
        blocks = self._guard("fit a path", None, self._fitting, node, num_complete_blocks)
        if blocks is None:
            return None
        lifecycle, nodes = self._trie._kv_lifecycle, self._nodes  # noqa: SLF001
        lifecycle.begin_path_extension(node)
        node.children[nodes[0].block_hash] = nodes[0]
        tracker = tracker_of(self._trie)
        if tracker is not None:
            tracker.hung(nodes, node, self._named)
        self._seq.prefix_cache.trie_cursor = nodes[-1]
        lifecycle.commit_path_extension(nodes[-1], ref_blocks=blocks, free_blocks=[])
        return nodes[-1]

    def _fitting(self, node: Any, num_complete_blocks: int) -> list[int] | None:
        """Return the request's blocks that the path is made of; None where it isn't what would be made now."""
        seq, nodes = self._seq, self._nodes
        overlap = seq.prefix_cache.recompute_overlap
        if not (
            nodes
            and len(nodes) == self._last - self._first
            and self._last <= num_complete_blocks
            and node is self._parent
            and node.is_attached_or_root()
            and nodes[0].block_hash not in node.children
            and overlap.fresh_block_range is None
            and not overlap.trie_block_map
        ):
            return None
        blocks: list[int] = seq.logical_blocks.get_real_blocks()[self._first : self._last].tolist()
        return blocks if blocks == self._blocks else None

    def _make(self) -> Iterator[bool]:
        from lmdeploy.pytorch.paging.block_trie.node import Node

        trie, seq, size, above = self._trie, self._seq, self._trie.block_size, self._parent
        eviction = eviction_of(trie)
        for place in range(self._first, self._last):
            start, end = place * size, (place + 1) * size
            tokens = seq.history_cache[start:end]
            identity = seq.get_prefix_cache_extra_identity(start, end)
            node = Node(
                block_hash=trie._hash_block(tokens, identity),  # noqa: SLF001
                block_id=seq.logical_blocks[place],
                token_ids=tokens,
                prefix_len=end,
                extra_identity=identity,
                adapter_name=seq.adapter_name,
            )
            if above is not self._parent:
                above.children[node.block_hash] = node
            node._parent = above  # noqa: SLF001 - ``attach_to`` would tell of it
            content_of(node)  # what a policy will call it, and is told of when a request waits
            if eviction is not None:
                setattr(node, EVICTION, eviction)
            self._nodes.append(node)
            self._blocks.append(int(node.block_id))
            above = node
            if len(self._nodes) % SLICE_BLOCKS == 0:
                yield True
        tracker = tracker_of(trie)
        if tracker is not None and self._nodes:
            self._named = tracker.named(self._nodes, self._parent)


class PathMaker:
    """Makes the paths of the loads that are under way, one after the other."""

    def __init__(self, guard: Guard, *, grace_s: float = GRACE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._guard = guard
        self._grace_s = grace_s
        self._clock = clock
        self._begins_s = 0.0
        self._paths: dict[int, TriePath] = {}

    def begin(self, trie: Any, seq: Any, last_block: int) -> None:
        """Note that ``seq`` is being loaded up to ``last_block`` (exclusive)."""
        if trie.enabled and not seq.return_routed_experts:
            path = TriePath(trie, seq, last_block, guard=self._guard)
            setattr(seq, _PATH, path)
            self._paths[int(seq.seq_id)] = path
            self._begins_s = self._clock() + self._grace_s

    def work(self) -> bool:
        """Make a slice of the oldest path and return whether there was one to work at."""
        if not self._paths or self._clock() < self._begins_s:
            return False
        for request_id, path in self._paths.items():
            if not path.work():
                del self._paths[request_id]
            return True
        return False

    def end(self, request_id: int) -> None:
        """Work no more at a request's path: its load has ended."""
        self._paths.pop(request_id, None)

    def clear(self) -> None:
        """Work at no path any more."""
        self._paths.clear()


def trie_extend_path(original: Callable[[Any, Any, Any, int], None]) -> Callable[[Any, Any, Any, int], None]:
    """``BlockTrie._extend_trie_path``: what was made for this sequence is hung up, LMDeploy does the rest."""

    @wraps(original)
    def _extend_trie_path(self: Any, seq: Any, node: Any, num_complete_blocks: int) -> None:
        path: TriePath | None = seq.__dict__.pop(_PATH, None)
        if path is not None:
            tail = path.hang(node, num_complete_blocks)
            if tail is not None and tail.prefix_len // self.block_size >= num_complete_blocks:
                return
            node = node if tail is None else tail
        original(self, seq, node, num_complete_blocks)

    return _extend_trie_path
