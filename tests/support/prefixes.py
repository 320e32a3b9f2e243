"""Small prompts, their keys, and a hash too weak to keep them apart."""

from hashlib import blake2b

from hypothesis import strategies as st

from kvcontrol.core import BlockHash, CacheIdentity, token_bytes

SIZE = 4
"""Tokens in a block."""
IDENTITY = CacheIdentity(model="m", revision="r", kv_dtype="float32", block_size_tokens=SIZE)


def prompt(*blocks: int, tail: int = 0) -> bytes:
    """Packed tokens: each number is one block of that token, then ``tail`` loose tokens."""
    return token_bytes([block for block in blocks for _ in range(SIZE)] + [9] * tail)


def weak_chain(parent: BlockHash, tokens: bytes, block_size_tokens: int) -> list[BlockHash]:
    """A chained hash of four bits: collisions are certain."""
    width = block_size_tokens * 4
    hashes = []
    current: bytes = parent
    for start in range(0, len(tokens) - width + 1, width):
        current = bytes([blake2b(current + tokens[start : start + width], digest_size=1).digest()[0] & 15])
        hashes.append(BlockHash(current))
    return hashes


def depth_chain(parent: BlockHash, tokens: bytes, block_size_tokens: int) -> list[BlockHash]:
    """The depth as the hash: all prompts of a length collide, each in every block."""
    del parent
    return [BlockHash(bytes([depth])) for depth in range(len(tokens) // (block_size_tokens * 4))]


prompts = st.lists(st.integers(1, 3), max_size=5).flatmap(
    lambda blocks: st.integers(0, 2).map(lambda tail: prompt(*blocks, tail=tail))
)
salts = st.sampled_from(["", "a", "b"])
