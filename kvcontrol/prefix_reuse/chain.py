"""One growing prompt, cut into full blocks and their chained hashes; each block is hashed once."""

from collections.abc import Callable

from kvcontrol.core.hashing import TOKEN_BYTES, chain_hashes
from kvcontrol.core.ids import BlockHash


class PromptChain:
    """The blocks of one sequence under one root; append-only, like the sequence's KV.

    ``source(first, last)`` returns the packed tokens (``hashing.token_bytes``) of positions ``first`` to ``last`` - 1.
    """

    def __init__(self, root: BlockHash, *, block_size_tokens: int, source: Callable[[int, int], bytes]) -> None:
        if block_size_tokens <= 0:
            raise ValueError(f"block_size_tokens is {block_size_tokens}; it must be > 0")
        self.root = root
        self.block_size_tokens = block_size_tokens
        self.keys: list[BlockHash] = []
        self.block_tokens: list[bytes] = []
        """Each block's own packed tokens."""
        self._source = source

    def grow(self, blocks: int) -> None:
        """Hash so far that at least ``blocks`` blocks are known; only the new ones cost anything.

        Raises ``ValueError`` when the source gives more or fewer tokens than asked for, and whatever it raises; then
        nothing has changed.
        """
        known = len(self.keys)
        if blocks <= known:
            return
        size = self.block_size_tokens
        width = size * TOKEN_BYTES
        packed = self._source(known * size, blocks * size)
        if len(packed) != (blocks - known) * width:
            raise ValueError(
                f"the source gave {len(packed)} bytes for tokens {known * size} to {blocks * size - 1}; "
                f"they have {(blocks - known) * width}"
            )
        keys = chain_hashes(self.keys[-1] if known else self.root, packed, size)
        tokens = [packed[start : start + width] for start in range(0, len(packed), width)]
        self.keys += keys
        self.block_tokens += tokens

    def tokens(self, block: int) -> bytes:
        """Return one block's own packed tokens."""
        return self.block_tokens[block]

    def parent(self, block: int) -> BlockHash | None:
        """Return the key of the block before, None for the first."""
        return self.keys[block - 1] if block else None
