"""What every eviction policy answers to: hooks that keep it informed, and the one question."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """What a policy may know beyond its own history when it chooses: the tier's state and how many blocks must go."""

    tier: CacheTier
    wanted_blocks: int
    used_blocks: int
    capacity_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionDecision:
    """``victims`` in the order in which they should go, fewer than wanted when the rest is held; why, in words."""

    victims: tuple[BlockId, ...]
    reason: str


class EvictionPolicy(Protocol):
    """Chooses which blocks leave one tier. Not thread-safe: it belongs to whoever owns the tier.

    Blocks come in *paths*: sequences in prompt order, heads before tails, because a block is of no use without those
    before it. A block is inserted once, and told of only while it is resident (``KeyError`` otherwise); a path names a
    block once (``ValueError``). A call that raises has changed nothing. Every hook is O(1) amortised a block.

    A held block is never a victim. A policy chooses a tail before its head where every call that named the tail named
    the head too; whoever tells of tails alone must be ready to be given a head whose tail stays.
    """

    name: str

    def __len__(self) -> int:
        """Return the number of blocks that the policy knows, held ones included."""

    def insert(self, path: Sequence[BlockId]) -> None:
        """Follow blocks that became resident; ``ValueError`` for one that is resident already."""

    def access(self, path: Sequence[BlockId]) -> None:
        """Follow a use of resident blocks."""

    def hold(self, path: Sequence[BlockId]) -> None:
        """Keep blocks from being chosen until as many ``release``."""

    def release(self, path: Sequence[BlockId]) -> None:
        """Undo one ``hold``; the blocks count as used now. ``ValueError`` for a block that isn't held."""

    def remove(self, path: Sequence[BlockId]) -> None:
        """Follow blocks that left for another reason than this policy's choice; held ones too."""

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """Choose up to ``context.wanted_blocks``; those chosen are removed from the policy."""


__all__ = ["EvictionDecision", "EvictionPolicy", "PolicyContext"]
