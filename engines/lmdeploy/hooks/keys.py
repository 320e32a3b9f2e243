"""Hooks that speed up the look-up of cached prompts."""

from engines.lmdeploy.hooks.names import TRIE
from engines.lmdeploy.patching import Hook


def key_hooks() -> list[Hook]:
    """In the engine process: how the block trie hashes and compares blocks."""
    from engines.lmdeploy.trie import keys

    identity = "extra_identity: tuple[lmdeploy.pytorch.prefix_cache_state.MultimodalSpan, ...]"
    return [
        Hook(
            target=f"{TRIE}.trie:BlockTrie._hash_block",
            signature=f"(token_ids: numpy.ndarray, {identity})",
            replace=keys.trie_hash_block,
            why="a Python integer is made of each token of each block",
        ),
        Hook(
            target=f"{TRIE}.trie:BlockTrie._node_matches_block",
            signature=f"(node: {TRIE}.node.Node, token_ids: numpy.ndarray, {identity})",
            replace=keys.trie_node_matches_block,
            why="comparing 64 tokens through numpy takes longer than all else that a cached block costs",
        ),
    ]
