"""LMDeploy's own block trie, for a race with our prefix index.

The search is LMDeploy's own method on its own nodes (``BlockTrie._find_deepest_block_match_step``: hash a block's
tokens, look the hash up among the children, compare tokens), given a stand-in for a sequence that has what it reads.
"""

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.bench.prefix.lookup_times import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrieSequence:
    """What the search reads of an LMDeploy sequence."""

    history_cache: "np.ndarray[Any, np.dtype[np.int64]]"

    @property
    def num_valid_ids(self) -> int:
        return len(self.history_cache) + 1

    def get_prefix_cache_extra_identity(self, start: int, end: int) -> tuple[()]:
        del start, end
        return ()


class LmdeployTrie:
    """A root to search from; LMDeploy's methods read nothing else of a ``BlockTrie`` here.

    Raises ``ImportError`` where LMDeploy is not installed.
    """

    name = "LMDeploy BlockTrie"

    def __init__(self) -> None:
        from lmdeploy.pytorch.paging.block_trie.node import Node
        from lmdeploy.pytorch.paging.block_trie.trie import BlockTrie

        self.block_size = BLOCK_TOKENS
        self._hash_block = BlockTrie._hash_block  # noqa: SLF001 - it is what is measured
        self._node_matches_block = BlockTrie._node_matches_block  # noqa: SLF001
        self._find = BlockTrie._find_deepest_block_match_step  # noqa: SLF001
        self._node = Node
        self._root = Node(-1, -1, None)

    def given(self, tokens: "array[int]") -> TrieSequence:
        return TrieSequence(history_cache=np.array(tokens, dtype=np.int64))

    def insert(self, prompt: TrieSequence) -> None:
        node = self._root
        for start in range(0, len(prompt.history_cache), BLOCK_TOKENS):
            tokens = prompt.history_cache[start : start + BLOCK_TOKENS]
            key = self._hash_block(tokens, ())
            child = node.children.get(key)
            if child is None:
                child = self._node(key, 0, tokens, prefix_len=start + BLOCK_TOKENS)
                child.attach_to(node)
            node = child

    def find(self, prompt: TrieSequence) -> int:
        return int(self._find(self, prompt, self._root))
