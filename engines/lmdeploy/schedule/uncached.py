"""How many tokens of a waiting prompt have to be computed: what neither HBM nor a tier below it has.

A strategy orders by it, and a shorter prompt overtakes by it, before LMDeploy has matched the prompt. Looking changes
nothing: no block is referenced, no access counted. What is evicted afterwards makes the prompt longer than it was found
to be. About 3 us a block; a prompt that waits alone is not looked up. The engine's thread.
"""

from typing import Any, Final

from engines.lmdeploy.offload.setup import tiers_of

_CACHED: Final = "kvgate_cached_tokens"


def look_up(scheduler: Any, seq: Any) -> bool:
    """Note how many tokens at the beginning of a waiting prompt are in HBM or a tier; return whether there are any."""
    trie = scheduler.block_trie
    if not trie.enabled:
        return False
    tokens = _in_hbm(trie, seq)
    tiers = tiers_of(scheduler.cache_config)
    if tiers is not None and tiers.planner is not None:
        tokens += tiers.planner.held_tokens(seq, tokens)
    setattr(seq, _CACHED, tokens)
    return tokens > 0


def left_tokens(scheduler: Any, seq: Any) -> int:
    """Return how many tokens of a waiting prompt have to be computed; it is looked up once."""
    if not hasattr(seq, _CACHED):
        look_up(scheduler, seq)
    return known_left_tokens(seq)


def known_left_tokens(seq: Any) -> int:
    """Return how many tokens of a waiting prompt have to be computed, as far as is known without another look."""
    return max(1, int(seq.num_valid_ids) - max(int(seq.num_history_ids), getattr(seq, _CACHED, 0)))


def _in_hbm(trie: Any, seq: Any) -> int:
    """Return the tokens of the prompt's longest prefix in LMDeploy's trie; ``BlockTrie.match`` without its effects."""
    node = seq.prefix_cache.trie_cursor or trie._roots.get(seq.adapter_name)  # noqa: SLF001
    if node is None:
        return 0
    size, end = trie.block_size, int(seq.num_valid_ids)
    while (start := node.prefix_len) + size < end:
        tokens, identity = (
            seq.history_cache[start : start + size],
            seq.get_prefix_cache_extra_identity(start, start + size),
        )
        child = node.children.get(trie._hash_block(tokens, identity))  # noqa: SLF001
        if child is None or not trie._node_matches_block(child, tokens, identity):  # noqa: SLF001
            break
        node = child
    return int(node.prefix_len)
