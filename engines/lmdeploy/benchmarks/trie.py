"""The same question, from tokens to verified blocks, to LMDeploy's own block trie and to our prefix index, in turns.

LMDeploy's search is its own method on its own nodes (``BlockTrie._find_deepest_block_match_step``: hash a block's
tokens, look the hash up among the children, compare tokens), given a stand-in for a sequence that has what it reads.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcontrol.core import CacheIdentity, token_bytes
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.prefix_reuse import BlockKeys, PrefixReuseIndex
from kvcontrol.prefix_reuse.benchmarks.timing import each_s, quantile

_BLOCK_TOKENS = 64
_LENGTHS = (188, 2_048)
_VOCABULARY = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """What the search reads of an LMDeploy sequence."""

    history_cache: "np.ndarray[Any, np.dtype[np.int64]]"

    @property
    def num_valid_ids(self) -> int:
        return len(self.history_cache) + 1

    def get_prefix_cache_extra_identity(self, start: int, end: int) -> tuple[()]:
        del start, end
        return ()


class _Search:
    """A root to search from; LMDeploy's methods read nothing else of a ``BlockTrie`` here."""

    def __init__(self) -> None:
        from lmdeploy.pytorch.paging.block_trie.node import Node
        from lmdeploy.pytorch.paging.block_trie.trie import BlockTrie

        self.block_size = _BLOCK_TOKENS
        self._hash_block = BlockTrie._hash_block  # noqa: SLF001 - it is what is measured
        self._node_matches_block = BlockTrie._node_matches_block  # noqa: SLF001
        self._find = BlockTrie._find_deepest_block_match_step  # noqa: SLF001
        self._node = Node
        self.root = Node(-1, -1, None)

    def insert(self, sequence: _Sequence) -> None:
        node = self.root
        for start in range(0, len(sequence.history_cache), _BLOCK_TOKENS):
            tokens = sequence.history_cache[start : start + _BLOCK_TOKENS]
            child = self._node(self._hash_block(tokens, ()), 0, tokens, prefix_len=start + _BLOCK_TOKENS)
            child.attach_to(node)
            node = child

    def find(self, sequence: _Sequence) -> int:
        return int(self._find(self, sequence, self.root))


def run(*, lookups: int = 200, prompts: int = 20, seed: int = 0) -> dict[str, float]:
    """Return metrics by name; raises ``ImportError`` where LMDeploy is not installed."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    identity = CacheIdentity(model="m", revision="r", kv_dtype="bfloat16", block_size_tokens=_BLOCK_TOKENS)
    metrics: dict[str, float] = {}
    for length in _LENGTHS:
        search = _Search()
        index = PrefixReuseIndex(BlockKeys(identity), capacity_blocks=prompts * length)
        asked: list[tuple[_Sequence, bytes]] = []
        for _ in range(prompts):
            ids = np.array(rng.choices(range(_VOCABULARY), k=length * _BLOCK_TOKENS), dtype=np.int64)
            packed = token_bytes(ids.tolist())
            search.insert(_Sequence(history_cache=ids))
            index.insert(packed, range(length))
            asked.append((_Sequence(history_cache=ids), packed))
        calls = rng.choices(asked, k=lookups)
        theirs_s = each_s(calls, lambda call, trie=search: _expect(trie.find(call[0]), call[1]), warm_up=5)  # type: ignore[misc]
        ours_s = each_s(calls, lambda call, ours=index: _expect(_verified(ours, call[1]), call[1]), warm_up=5)  # type: ignore[misc]
        metrics |= {
            f"lmdeploy_trie_{length}_p50_us": quantile(theirs_s, 0.5) * 1e6,
            f"tokens_to_verified_{length}_p50_us": quantile(ours_s, 0.5) * 1e6,
            f"lmdeploy_trie_over_ours_{length}_ratio": quantile(theirs_s, 0.5) / quantile(ours_s, 0.5),
        }
    return metrics


def _verified(index: PrefixReuseIndex, tokens: bytes) -> int:
    return index.matcher.verify(index.lookup(tokens), tokens).matched_length


def _expect(found: int, tokens: bytes) -> None:
    if found != len(tokens) // TOKEN_BYTES:
        raise AssertionError(f"found {found} of {len(tokens) // TOKEN_BYTES} tokens")


__all__ = ["run"]
