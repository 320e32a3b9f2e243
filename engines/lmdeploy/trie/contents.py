"""What the blocks of LMDeploy's trie hold, as numbers, and whose they are.

A number is chained from the trie's own hashes: alike when the same tokens come again after the same ones, in this
process. Two contents with one number would share their history in a policy, nothing else.
"""

from typing import Any

from engines.lmdeploy.trie.tenancy import salt_of_identity
from kvcontrol.core.tenant import tenant_of_salt

_CONTENT = "kvgate_content"


def content_of(node: Any) -> int:
    """Return a number for what a node holds and all before it; O(1) where its parent's is known."""
    known: int | None = getattr(node, _CONTENT, None)
    if known is None:
        known = _chained(_above(node), node.block_hash)
        setattr(node, _CONTENT, known)
    return known


def content_above(node: Any) -> int | None:
    """Return the content that a node follows on; None for the first block of a prompt."""
    parent = node.parent
    return None if parent is None or parent.parent is None else content_of(parent)


def prompt_contents(trie: Any, sequence: Any) -> list[int]:
    """Return the contents of the whole blocks that a matched prompt asked for, in the trie or not, in its order.

    The last token is left out, as in LMDeploy's match: it is computed in any case. O(blocks), each one that the match
    didn't find hashed once.
    """
    size = sequence.block_size
    start, end = sequence.prefix_cache.match_start_step // size, (sequence.input_end_pos - 1) // size
    node = sequence.prefix_cache.trie_cursor
    matched: list[int] = []
    number = hash(sequence.adapter_name)
    at = 0
    if node is not None and node.parent is not None:
        number, at = content_of(node), node.prefix_len // size
        while node.parent is not None:
            matched.append(content_of(node))
            node = node.parent
        matched.reverse()
    contents = matched[start:end]
    for place in range(at, end):
        first, last = place * size, (place + 1) * size
        tokens = sequence.history_cache[first:last]
        number = _chained(number, trie._hash_block(tokens, sequence.get_prefix_cache_extra_identity(first, last)))  # noqa: SLF001
        if place >= start:
            contents.append(number)
    return contents


def tenant_of(node: Any) -> str:
    """Return the tenant whose salt a node's content was asked for with."""
    return tenant_of_salt(salt_of_identity(node.extra_identity))


def _above(node: Any) -> int:
    parent = node.parent
    return hash(node.adapter_name) if parent is None or parent.parent is None else content_of(parent)


def _chained(above: int, block_hash: int) -> int:
    return hash((above, block_hash))
