"""The interface of eviction policies: hooks for changes of a tier, and the choice of victims.

Question and answer are tuples with names: an allocation in a full cache makes one of each, and a frozen dataclass takes
three times as long to make.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId

ContentKey: TypeAlias = Hashable
"""Names what a block holds: equal whenever the same content comes again, under whatever ``BlockId`` it does.

A chained hash, or anything else that compares and hashes like one. Policies remember by it what has left.
"""


class PolicyContext(NamedTuple):
    """What a policy may know beyond its own history when it chooses: the tier's state, how many blocks must go, and for
    whom.

    ``incoming`` are the keys of the blocks that the victims make room for, in the order in which they will come; empty
    where the caller doesn't know. A policy that learns from the return of what it gave up learns it here before it
    chooses, and otherwise at ``insert``.
    """

    tier: CacheTier
    wanted_blocks: int
    used_blocks: int
    capacity_blocks: int
    incoming: Sequence[ContentKey] = ()


class EvictionDecision(NamedTuple):
    """``victims`` in the order in which they should go, fewer than wanted when the rest is held; why, in words."""

    victims: tuple[BlockId, ...]
    reason: str


class EvictionPolicy(Protocol):
    """Chooses which blocks leave one tier. Not thread-safe: it belongs to the owner of the tier.

    Blocks come in *paths*: sequences in prompt order, heads before tails, because a block is of no use without those
    before it. A block is inserted once, and told of only while it is resident (``KeyError`` otherwise); a path names a
    block once (``ValueError``). Numbers and keys that can't be are refused with ``PolicyError``, a ``ValueError``, by
    all policies alike. A call that raises has changed nothing. Every hook is O(1) amortised a block, or logarithmic
    where a policy's file says so; none looks at all blocks.

    A held block is never a victim. Within a call tails count as used before their heads. A policy that is
    ``tails_first`` therefore chooses a tail before its head where whoever uses the tail uses the head too. Others order
    blocks by more than their last uses (when they came, which queue they are in): their callers must be ready to be
    given a head whose tail stays, as must those who tell of tails alone. They may insert it anew.
    """

    name: str
    tails_first: bool
    follows_prompts: bool
    """Whether ``requested`` is more than nothing: owners to whom telling costs something may leave it out otherwise."""
    counts_uses: bool
    """Whether ``access`` says more than a hold and its release do; likewise."""

    def __len__(self) -> int:
        """Return the number of blocks that the policy knows, held ones included."""

    def requested(self, prompt: Sequence[ContentKey], *, block_tokens: int, prompt_tokens: int) -> None:
        """Follow a prompt that came, before anything of it is used: the keys of its blocks in order, resident or not.

        Every block has ``block_tokens``, but for the last, which has what is left of ``prompt_tokens``. Owners that
        know of prompts tell of every one; a policy that is told of none counts uses one by one.
        """

    def insert(self, path: Sequence[BlockId], keys: Sequence[ContentKey] = ()) -> None:
        """Follow blocks that became resident; ``ValueError`` for one that is resident already.

        ``keys`` name their contents, one for each (``ValueError`` otherwise); blocks without keys are not known again
        once they have left.
        """

    def access(self, path: Sequence[BlockId]) -> None:
        """Follow a use of resident blocks."""

    def hold(self, path: Sequence[BlockId]) -> None:
        """Keep blocks from being chosen until as many ``release``."""

    def release(self, path: Sequence[BlockId]) -> None:
        """Undo one ``hold``; where recency counts, the blocks are used now, though no more often. ``ValueError`` for a
        block that isn't held.
        """

    def remove(self, path: Sequence[BlockId]) -> None:
        """Follow blocks that left for another reason than this policy's choice; held ones too."""

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """Choose up to ``context.wanted_blocks``, a whole number >= 0; those chosen are removed from the policy."""
