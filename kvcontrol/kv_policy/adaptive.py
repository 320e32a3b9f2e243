"""Adaptive: LRU's order as long as nothing better is proven, and never so far from it that it could end up behind.

Blocks stand in two LRU lines, of those used once and of those that came again (``two_lines``: a key that left is
remembered for four capacities). How much longer a second use is worth keeping is one number, the weight: 1 is LRU,
infinity lets what was used once go first. Which weight finds most depends on the workload and on the size of the
cache, and no fixed one is best: on a public chat trace infinity finds 36 % more than LRU at 5,859 blocks and 3 % less
at 50,000.

*Choice.* For each weight of ``WEIGHTS`` a shadow cache follows a sample of the keys (every 2^n-th, by hash, so that
one or two thousand blocks of each are followed at most: a sampled cache that is as much smaller finds as large a
share). Eight times per turnover the shadows' hits are compared with LRU's. A weight is taken when it wins by more than
half its spread: wins and losses come in prompts, not in blocks, so the spread is that of whole periods. What lies four
turnovers back counts little.

*Guard.* An exact LRU ghost (``ghost_lru``) says of every prompt that comes how many of its tokens LRU would find, and
at every eviction how many blocks LRU would hold that are missing here. Those are all that can be lost by going back to
LRU's order, as long as no head goes before its tails, and another order is followed only while what was gained over LRU
so far, plus ``RISK`` of LRU's tokens, is more than that. So tokens found are never below 1 - RISK of LRU's, whatever
the shadows say; gains buy the freedom for more. A head whose tails are here is therefore left to LRU's order, in which
its turn comes after theirs (or, of a prompt that is coming in tail first, just before it is used). Where the owner
tells of no prompts, uses are counted instead. The real blocks stay where they are when the weight changes: there is
nothing to hand over.

Held blocks stand outside and return to the young end of their line. Paths keep tails before heads, as a head is used
and remembered at least as often as its tails. Every hook is O(1) a block. Rejected: whole policies as candidates (a
switch must tell the new one of all blocks, and what it learnt before is gone); a weight that follows its gradient (one
prompt of 200 blocks is more than a period's evidence); locking the guard for a while after a loss (what is lost by
then is lost).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.base import PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey, EvictionDecision, PolicyContext
from kvcontrol.kv_policy.ghost import GhostList
from kvcontrol.kv_policy.ghost_lru import LruGhost, sampled, sampling_shift
from kvcontrol.kv_policy.two_lines import TwoLines
from kvcontrol.kv_policy.weight_shadow import WeightShadow

WEIGHTS: Final = (1.0, 1.7, 4.0, math.inf)
RISK: Final = 0.009
"""The share of LRU's tokens that may be lost at most."""
_GHOSTS: Final = 4
_SAMPLE_BLOCKS: Final = 2048
"""A shadow has at most so many."""
_SPARSE_BLOCKS: Final = 128
"""In caches of as many, shadows follow every second key at most: they would cost as much as the cache."""
_PERIODS: Final = 8
"""Decisions per turnover: as many uses as there are blocks."""
_FADE: Final = 1 - 1 / (4 * _PERIODS)
_LEAST_PERIOD: Final = 64
_SPREADS: Final = 0.5
_MARGIN: Final = 0.01
"""A weight that wins by less than this share of LRU's hits isn't worth the change."""
_STAY: Final = 1.1
"""Another weight is taken only when it wins by so much more than the present one."""


_REASONS: Final = tuple(f"adaptive: oldest, where what came again ages {each:g} times as slowly" for each in WEIGHTS)
_REASONS_BEHIND: Final = tuple(
    f"adaptive: used longest ago, until a weight of {weight:g} can't cost more than it has gained" for weight in WEIGHTS
)


class _Entry:
    __slots__ = ("again", "key", "parent")

    def __init__(self, key: ContentKey, parent: ContentKey | None, again: bool) -> None:  # noqa: FBT001 - one place
        self.key = key
        self.parent = parent
        self.again = again


class AdaptiveState(NamedTuple):
    """What it does and why, for whoever watches. ``hits`` and ``lru_hits`` are what the guard counts: tokens of
    prompts, or uses where nobody tells of prompts.
    """

    weight: float
    follows: float
    """The weight in force: 1 while the guard says so."""
    hits: int
    lru_hits: int
    behind_blocks: int
    switches: int


class AdaptivePolicy(PathPolicy[_Entry]):
    """See the module's text."""

    name = "adaptive"
    tails_first = True
    follows_prompts = True

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__()
        self._lines: TwoLines[BlockId] = TwoLines()
        self._ghosts: GhostList[bool] = GhostList(_GHOSTS * capacity_blocks)
        self._lru = LruGhost(capacity_blocks)
        self._shift = max(sampling_shift(capacity_blocks, _SAMPLE_BLOCKS), capacity_blocks >= _SPARSE_BLOCKS)
        self._candidates = tuple(WeightShadow(weight, ghosts=_GHOSTS) for weight in WEIGHTS)
        self._room = 0
        self._uses = 0
        self._chosen = 0
        self._switches = 0
        self._baseline = 0.0
        self._tails: dict[ContentKey, int] = {}
        """How many resident blocks follow on a content, as far as prompts told; absent is none."""
        self._parents: dict[ContentKey, ContentKey] = {}
        """What comes before each content of the present prompt."""
        self._told = False
        self._most_behind = math.inf
        """A block that isn't LRU's to go may go while fewer are behind."""
        self.reason = _REASONS[0]

    def state(self) -> AdaptiveState:
        """Return what it does now. O(1)."""
        lru = self._lru
        return AdaptiveState(
            weight=WEIGHTS[self._chosen],
            follows=WEIGHTS[self._chosen] if lru.behind < lru.most_behind(RISK) else 1.0,
            hits=lru.hits,
            lru_hits=lru.lru_hits,
            behind_blocks=lru.behind,
            switches=self._switches,
        )

    def requested(self, prompt: Sequence[ContentKey], *, block_tokens: int, prompt_tokens: int) -> None:
        """See ``EvictionPolicy``."""
        self._told = True
        self._lru.requested(prompt, block_tokens, prompt_tokens)
        self._parents = dict(pairwise(reversed(prompt)))
        keys = [key for key in prompt if sampled(key, self._shift)] if self._shift else prompt
        first, *others = self._candidates
        baseline = first.find(keys)
        self._baseline += baseline
        for shadow in others:
            shadow.lead += shadow.find(keys) - baseline

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """See ``EvictionPolicy``."""
        self._room = len(self._entries)  # whoever makes room has none: that is how many fit
        self._most_behind = math.inf if self._chosen == 0 else self._lru.most_behind(RISK)
        return super().select_victims(context)

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        if key is None:
            key = object()  # will never be known again
        again = self._ghosts.take(key) is not None
        parent = self._parents.get(key)
        self._entries[block] = _Entry(key, parent, again)
        if parent is not None:
            self._tails[parent] = self._tails.get(parent, 0) + 1
        self._lines.put(block, again=again)
        self._room = max(self._room, len(self._entries))
        self._lru.came(key, self._room)
        self._count(key)

    def _touch(self, block: BlockId) -> None:
        entry = self._entries[block]
        if block not in self._holds:
            self._lines.use(block)
        entry.again = True
        self._lru.used(entry.key, self._room)
        self._count(entry.key)

    def _park(self, block: BlockId) -> None:
        self._lines.drop(block, again=self._entries[block].again)

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            entry = self._entries[block]
            self._lines.put(block, again=entry.again)
            self._lru.refreshed(entry.key, self._room)

    def _drop(self, block: BlockId) -> None:
        entry = self._entries[block]
        if block not in self._holds:
            self._lines.drop(block, again=entry.again)
        self._ghosts.put(entry.key, True)  # noqa: FBT003 - a value that nobody reads
        if entry.parent is not None:
            self._unlink(entry.parent)
        self._lru.lost(entry.key)

    def _choose(self, incoming: ContentKey | None) -> BlockId | None:  # noqa: ARG002 - it learns at the insertion
        # Written out, because each call costs as much as a step, and more where the processor's caches are cold.
        lru, lines, chosen = self._lru, self._lines, self._chosen
        if lru.behind < self._most_behind:
            follows = WEIGHTS[chosen]
            self.reason = _REASONS[chosen]
        else:
            follows = 1.0
            self.reason = _REASONS_BEHIND[chosen]
        block = lines.first(follows)
        if block is None:
            return None
        entries = self._entries
        entry = entries[block]
        if follows != 1 and entry.key in self._tails:
            older = lines.first(1.0)
            if older is not None:
                block, entry = older, entries[older]
        del entries[block]
        del (lines.again if entry.again else lines.once)[block]
        key, parent = entry.key, entry.parent
        if parent is not None:
            self._unlink(parent)
        self._ghosts.put(key, True)  # noqa: FBT003 - a value that nobody reads
        lru.went(key)
        return block

    def _unlink(self, parent: ContentKey) -> None:
        left = self._tails[parent] - 1
        if left:
            self._tails[parent] = left
        else:
            del self._tails[parent]

    def _count(self, key: ContentKey) -> None:
        self._uses += 1
        if not self._shift or sampled(key, self._shift):
            room = max(1, self._room >> self._shift)
            first, *others = self._candidates
            baseline = first.use(key, room)
            if self._told:
                for shadow in others:
                    shadow.use(key, room)
            else:
                self._baseline += baseline
                for shadow in others:
                    shadow.lead += shadow.use(key, room) - baseline
        if self._uses >= max(_LEAST_PERIOD, self._room // _PERIODS):
            self._uses = 0
            self._decide()

    def _decide(self) -> None:
        chosen, best = 0, 0.0
        for place, shadow in enumerate(self._candidates):
            shadow.end_period(_FADE)
            asked = 0.0 if place == self._chosen else _SPREADS * shadow.spread + _MARGIN * self._baseline
            if shadow.won > max(asked, best):
                chosen, best = place, shadow.won
        present = self._candidates[self._chosen]
        if present.won > 0 and best <= _STAY * present.won:
            chosen = self._chosen
        if chosen != self._chosen:
            self._chosen = chosen
            self._switches += 1
        self._baseline *= _FADE


__all__ = ["RISK", "WEIGHTS", "AdaptivePolicy", "AdaptiveState"]
