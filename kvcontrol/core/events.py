"""What an engine says about its cache: blocks stored, removed, all cleared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A chain of blocks is now readable in ``tier``; each is the child of the one before, the first of ``parent``.

    ``token_ids`` holds the tokens of all of them, in order (empty where the engine doesn't say); a tuple, or
    ``PackedTokens`` on their way out of an engine.
    ``parent`` is None for the first block of a prompt.
    """

    block_hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: Sequence[int]
    block_size_tokens: int
    tier: CacheTier = CacheTier.HBM
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """These blocks can no longer be read from ``tier``; copies in other tiers are untouched."""

    block_hashes: tuple[BlockHash, ...]
    tier: CacheTier = CacheTier.HBM


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """The instance holds nothing any more, in any tier."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """Events in the order in which they happened, published together at ``published_at_s`` (Unix time)."""

    published_at_s: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None


def sliced(event: KvEvent, max_blocks: int) -> Iterator[KvEvent]:
    """Yield events of at most ``max_blocks`` blocks that do, in their order, what ``event`` does at once."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= max_blocks:
        yield event
        return
    blocks = event.block_hashes
    for start in range(0, len(blocks), max_blocks):
        part = blocks[start : start + max_blocks]
        if isinstance(event, BlockRemoved):
            yield replace(event, block_hashes=part)
            continue
        size = event.block_size_tokens
        yield replace(
            event,
            block_hashes=part,
            parent=blocks[start - 1] if start else event.parent,
            token_ids=event.token_ids[start * size : (start + max_blocks) * size],
        )
