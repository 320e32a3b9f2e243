"""Adaptive: the order that finds most of late, and never so far from LRU's that it could end up behind.

Blocks stand in three LRU lines, of those used once, two or three times, and more often (``three_lines``: a key that
left is remembered with its uses for four capacities). How much longer further uses are worth keeping are two numbers,
the weights: 1 is LRU, infinity lets what was used once go first. Which find most depends on the workload and on the
size of the cache, and none are best everywhere: on a public chat trace infinity finds 36 % more than LRU at 5,859
blocks and 3 % less at 50,000.

*Choice.* For each of ``WEIGHTS`` a shadow cache follows a sample of the keys (every 2^n-th, by hash, so that one or two
thousand blocks of each are followed at most: a sampled cache that is as much smaller finds as large a share). Eight
times per turnover the shadows' hits are compared with those of the first, the weights to begin with: in caches that are
turned over a few times in all, evidence for them comes too late. Others, LRU's among them, are taken when they win by
more than half their spread: wins and losses come in prompts, not in blocks, so the spread is that of whole periods.
What lies four turnovers back counts little.

*Guard.* An exact LRU ghost (``ghost_lru``) says of every prompt that comes how many of its tokens LRU would find, and
at every eviction how many blocks LRU would hold that are missing here. Those are all that can be lost by going back to
LRU's order, as long as no head goes before its tails, and another order is followed only while what was gained over LRU
so far, plus ``RISK`` of LRU's tokens, is more than that. Where that leaves room for little more, only what was used
often is kept for longer (``SPARING``): that gains most for each block that is missing. So tokens found are never below
1 - RISK of LRU's, whatever the shadows say; gains buy the freedom for more. A head whose tails are here is therefore
left to LRU's order, in which its turn comes after theirs (or, of a prompt that is coming in tail first, just before it
is used). Where the owner tells of no prompts, uses are counted instead. The real blocks stay where they are when the
weights change: there is nothing to hand over.

Held blocks stand outside and return to the young end of their line. Paths keep tails before heads, as a head is used
and remembered at least as often as its tails. Every hook is O(1) a block. Rejected: whole policies as candidates (a
switch must tell the new one of all blocks, and what it learnt before is gone); a weight that follows its gradient (one
prompt of 200 blocks is more than a period's evidence); locking the guard for a while after a loss (what is lost by
then is lost); a guard that holds only a measured share of what is missing to be lost, 3 spreads above what was asked
for till now (5 % more tokens at 10,000 blocks, and 1.2 to 1.8 % behind LRU where long after nothing all is asked for).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import check_capacity
from kvcontrol.kv_policy.base import PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey
from kvcontrol.kv_policy.ghost import GhostList
from kvcontrol.kv_policy.ghost_lru import LruGhost, sampled, sampling_shift
from kvcontrol.kv_policy.three_lines import ENDLESS, LINE_OF, LRU, OFTEN, ThreeLines, Weights
from kvcontrol.kv_policy.weight_shadow import WeightShadow

WEIGHTS: Final = (Weights(1, 1.7, 2.5), LRU, Weights(1, 2.5, 4.5), Weights(1, ENDLESS, ENDLESS))
"""The first is followed until another wins."""
_LRU: Final = WEIGHTS.index(LRU)
SPARING: Final = Weights(1, 1, 4)
"""Where little more may be missing: keeps what was used often alone, so that a block that is missing gains most."""
_AMPLE: Final = 0.8
"""Of what may be missing, the share from which on it is little."""
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


def _description(weights: Weights) -> float:
    return math.inf if weights.again == ENDLESS else weights.again


_REASONS: Final = tuple(
    f"adaptive: oldest, where what came again ages {_description(each):g} times as slowly" for each in WEIGHTS
)
_REASON_SPARING: Final = f"adaptive: oldest, where what was used {OFTEN} times ages {SPARING.often:g} times as slowly"
_REASONS_BEHIND: Final = tuple(
    f"adaptive: used longest ago, until a weight of {_description(each):g} can't cost more than it has gained"
    for each in WEIGHTS
)


class _Entry:
    __slots__ = ("key", "parent", "uses")

    def __init__(self, key: ContentKey, parent: ContentKey | None, uses: int) -> None:
        self.key = key
        self.parent = parent
        self.uses = uses
        """At most ``OFTEN``."""


class AdaptiveState(NamedTuple):
    """What it does and why, for whoever watches. ``hits`` and ``lru_hits`` are what the guard counts: tokens of
    prompts, or uses where nobody tells of prompts.
    """

    weight: float
    """How many times as slowly what came again ages; infinite is what lets all that was used once go first."""
    follows: float
    """The weight in force: 1 while the guard leaves room for little or nothing."""
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
        check_capacity(capacity_blocks)
        super().__init__()
        self._lines: ThreeLines[BlockId] = ThreeLines()
        self._ghosts: GhostList[int] = GhostList(_GHOSTS * capacity_blocks)
        self._lru = LruGhost(capacity_blocks)
        self._shift = max(sampling_shift(capacity_blocks, _SAMPLE_BLOCKS), capacity_blocks >= _SPARSE_BLOCKS)
        self._candidates = tuple(WeightShadow(weights, ghosts=_GHOSTS) for weights in WEIGHTS)
        self._capacity = 0
        self._uses = 0
        self._chosen = 0
        self._switches = 0
        self._baseline = 0.0
        self._tails: dict[ContentKey, int] = {}
        """How many resident blocks follow on a content, as far as prompts told; absent is none."""
        self._parents: dict[ContentKey, ContentKey] = {}
        """What comes before each content of the present prompt."""
        self._knows_incoming = False
        self.reason = _REASONS[0]

    def state(self) -> AdaptiveState:
        """Return what it does now. O(1), after a choice O(victims)."""
        if self._parted:
            self._settle()
        lru, weight = self._lru, _description(WEIGHTS[self._chosen])
        return AdaptiveState(
            weight=weight,
            follows=weight if lru.behind < _AMPLE * lru.most_behind(RISK) else 1.0,
            hits=lru.hits,
            lru_hits=lru.lru_hits,
            behind_blocks=lru.behind,
            switches=self._switches,
        )

    def requested(self, prompt: Sequence[ContentKey], *, block_tokens: int, prompt_tokens: int) -> None:
        """See ``EvictionPolicy``."""
        super().requested(prompt, block_tokens=block_tokens, prompt_tokens=prompt_tokens)
        if self._parted:
            self._settle()
        self._knows_incoming = True
        self._lru.requested(prompt, block_tokens, prompt_tokens)
        self._parents = dict(pairwise(reversed(prompt)))
        keys = [key for key in prompt if sampled(key, self._shift)] if self._shift else prompt
        first, *others = self._candidates
        baseline = first.find(keys)
        self._baseline += baseline
        for shadow in others:
            shadow.lead += shadow.find(keys) - baseline

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        if key is None:
            key = object()  # will never be known again
        uses = min(OFTEN, (self._ghosts.take(key) or 0) + 1)
        parent = self._parents.get(key)
        self._entries[block] = _Entry(key, parent, uses)
        if parent is not None:
            self._tails[parent] = self._tails.get(parent, 0) + 1
        self._lines.put(block, uses)
        self._capacity = max(self._capacity, len(self._entries))
        self._lru.came(key, self._capacity)
        self._count(key)

    def _touch(self, block: BlockId) -> None:
        entry = self._entries[block]
        uses = entry.uses
        if uses < OFTEN:
            entry.uses = uses + 1
        if block not in self._holds:
            self._lines.drop(block, uses)
            self._lines.put(block, entry.uses)
        self._lru.used(entry.key, self._capacity)
        self._count(entry.key)

    def _park(self, block: BlockId) -> None:
        self._lines.drop(block, self._entries[block].uses)

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            entry = self._entries[block]
            self._lines.put(block, entry.uses)
            self._lru.refreshed(entry.key, self._capacity)

    def _drop(self, block: BlockId) -> None:
        entry = self._entries[block]
        if block not in self._holds:
            self._lines.drop(block, entry.uses)
        self._ghosts.put(entry.key, entry.uses)
        if entry.parent is not None:
            self._unlink(entry.parent)
        self._lru.lost(entry.key)

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:
        self._capacity = len(self._entries)  # whoever makes room has none: that is how many fit
        lru, chosen = self._lru, self._chosen
        if incoming and self._knows_incoming:
            lru.make_way(wanted, self._capacity)
        most_behind = math.inf if chosen == _LRU else lru.most_behind(RISK)
        victims: list[BlockId] = []
        while (left := wanted - len(victims)) > 0:
            if lru.behind < _AMPLE * most_behind:
                follows, limit, self.reason = WEIGHTS[chosen], _AMPLE * most_behind, _REASONS[chosen]
            elif lru.behind < most_behind:
                follows, limit, self.reason = SPARING, most_behind, _REASON_SPARING
            else:
                follows, limit, self.reason = LRU, math.inf, _REASONS_BEHIND[chosen]
            # Each that goes may be one more behind: with so many the limit can't be reached before the last.
            gone = self._take(left if limit - lru.behind >= left else math.ceil(limit - lru.behind), follows)
            if not gone:
                break
            victims += gone
            if len(victims) < wanted:
                self._settle()  # it says how many are behind
        return victims

    def _part(self, entries: list[_Entry]) -> None:
        remember = self._ghosts.put
        for entry in entries:
            remember(entry.key, entry.uses)
        self._lru.went([entry.key for entry in entries])

    def _take(self, most: int, follows: Weights) -> list[BlockId]:
        """Take up to so many in the order of ``follows``, and in LRU's where that is a head whose tails are here."""
        entries, tails, part = self._entries, self._tails, self._parted.append
        first, lines = self._lines.first, self._lines.lines
        victims: list[BlockId] = []
        while len(victims) < most and (block := first(follows)) is not None:
            entry = entries[block]
            if entry.key in tails and follows is not LRU:
                older = first(LRU)
                if older is not None:
                    block, entry = older, entries[older]
            del entries[block]
            del lines[LINE_OF[entry.uses]][block]
            victims.append(block)
            part(entry)
            if entry.parent is not None:
                self._unlink(entry.parent)
        return victims

    def _unlink(self, parent: ContentKey) -> None:
        left = self._tails[parent] - 1
        if left:
            self._tails[parent] = left
        else:
            del self._tails[parent]

    def _count(self, key: ContentKey) -> None:
        self._uses += 1
        if not self._shift or sampled(key, self._shift):
            capacity = max(1, self._capacity >> self._shift)
            first, *others = self._candidates
            baseline = first.use(key, capacity)
            if self._knows_incoming:
                for shadow in others:
                    shadow.use(key, capacity)
            else:
                self._baseline += baseline
                for shadow in others:
                    shadow.lead += shadow.use(key, capacity) - baseline
        if self._uses >= max(_LEAST_PERIOD, self._capacity // _PERIODS):
            self._uses = 0
            self._decide()

    def _decide(self) -> None:
        chosen, best = 0, 0.0
        for place, shadow in enumerate(self._candidates):
            shadow.end_period(_FADE)
            threshold = 0.0 if place == self._chosen else _SPREADS * shadow.spread + _MARGIN * self._baseline
            if shadow.won > max(threshold, best):
                chosen, best = place, shadow.won
        present = self._candidates[self._chosen]
        if present.won > 0 and best <= _STAY * present.won:
            chosen = self._chosen
        if chosen != self._chosen:
            self._chosen = chosen
            self._switches += 1
        self._baseline *= _FADE
