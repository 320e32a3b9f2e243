"""A hash says where to look; only equal tokens say that a block may be used."""

from typing import Final, NamedTuple, Protocol

from kvcontrol.core import BlockHash
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.prefix_reuse.metrics import PrefixReuseMetrics
from lab.research.prefix_index.entry import PrefixHit

HASH_CONFIDENCE: Final = 0.999
"""The confidence of a hit whose tokens nobody has compared yet: below 1.0 and no probability."""


class Lineage(NamedTuple):
    """What a held block was computed from: its own packed tokens, after the block ``parent``; and where it lies."""

    tokens: bytes
    parent: BlockHash | None
    block_id: int


class KnowsLineage(Protocol):
    """Whatever can say what a block was computed from."""

    def lineage_of(self, key: BlockHash) -> Lineage | None:
        """Return a held block's lineage, None for an unknown key."""


class PrefixMatcher:
    """Compares a hit's blocks with the prompt: each block's tokens, and that it was computed after the one before.

    The second matters as much: a block with the right tokens behind another beginning holds another KV.
    """

    def __init__(self, held: KnowsLineage, metrics: PrefixReuseMetrics) -> None:
        self._held = held
        self._metrics = metrics

    def verify(self, hit: PrefixHit, tokens: bytes) -> PrefixHit:
        """Return the hit cut off before the first block that is gone or of other lineage; confidence 1.0.

        ``tokens`` is the packed prompt that was looked up. Another lineage under an equal hash is counted as a
        collision. About 1 us a block. What is true now may not be a moment later: who reads the blocks takes
        ``acquire``, which verifies and pins in one step.

        Raises ``ValueError`` for a hit that names more blocks than ids or the other way round, and for a prompt that is
        shorter than the blocks of the hit: it is not the one that was looked up.
        """
        if len(hit.block_hashes) != len(hit.kv_block_ids):
            raise ValueError(f"the hit has {len(hit.block_hashes)} hashes for {len(hit.kv_block_ids)} block ids")
        start = 0
        good = 0
        parent: BlockHash | None = None
        for key, block_id in zip(hit.block_hashes, hit.kv_block_ids, strict=True):
            held = self._held.lineage_of(key)
            if held is None or held.block_id != block_id:  # gone, or computed anew elsewhere
                break
            if start + len(held.tokens) > len(tokens):
                raise ValueError(
                    f"the prompt has {len(tokens) // TOKEN_BYTES} tokens and ends within the hit's "
                    f"{len(hit.block_hashes)} blocks: it is not the one that was looked up"
                )
            if held.parent != parent or tokens[start : start + len(held.tokens)] != held.tokens:
                self._metrics.collided()
                break
            start += len(held.tokens)
            parent = key
            good += 1
        matched = start // TOKEN_BYTES
        return PrefixHit(
            matched_length=matched,
            confidence=1.0,
            remaining_tokens=len(tokens) // TOKEN_BYTES - matched,
            kv_block_ids=hit.kv_block_ids[:good],
            block_hashes=hit.block_hashes[:good],
        )
