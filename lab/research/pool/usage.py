"""How much of a pool is used, how much of that is of use, and what has happened in it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """How a pool's bytes are used; what sizes lose to rounding counts with the block that loses it."""

    capacity_bytes: int
    free_bytes: int
    cached_bytes: int
    pinned_bytes: int

    @property
    def pinned_ratio(self) -> float:
        """The share that is in use by somebody: what has to be there."""
        return self.pinned_bytes / self.capacity_bytes

    @property
    def occupied_ratio(self) -> float:
        """The share that holds KV, in use or not: what an idle cache approaches 1 in."""
        return 1 - self.free_bytes / self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """Bytes that are there and are of no use.

    ``internal_ratio``: of the bytes that blocks take, the share that holds no KV. A pool counts what rounding loses
    (a block's size against its run's); a ``BlockManager`` counts also the unfilled part of last blocks.
    ``external_ratio``: of the blocks of the largest kind that the free bytes would hold if they lay together, the share
    that they can't hold as they lie. 0 where they would hold none, and where all blocks are alike.
    """

    internal_ratio: float
    external_ratio: float


@dataclass(slots=True)
class PoolCounters:
    """What has happened since the start; they only grow."""

    allocations: int = 0
    allocated_blocks: int = 0
    refusals: int = 0
    evictions: int = 0
    """How often the policy was asked for victims: once an allocation that finds too few free blocks, or a few times."""
    evicted_blocks: int = 0
    cleared_blocks: int = 0
    """Of the evicted: those chosen for their place, since a large run was wanted and no other way led there."""
