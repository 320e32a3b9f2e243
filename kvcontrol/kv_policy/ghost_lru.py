"""A ghost LRU cache beside a policy: the hits that LRU would have had, so that the policy knows its gain and risk.

The ghost gets the same uses and the same room as the real cache. LRU has a property that makes this a guarantee: what
it holds are the blocks used last, so a cache that begins to evict in LRU's order first loses all that LRU would not
hold. Whatever the policy did before, from then on it can miss at most the ``behind`` blocks that LRU holds and it
doesn't, each once. So as long as

    found - LRU's found + share x LRU's found  >=  behind        (in tokens)

is true after every eviction that isn't LRU's, what is found is never below (1 - share) of what LRU finds, at no moment
of no workload: it is earned before it is spent.

What is *found* are the tokens of a prompt's leading blocks that are there when it comes (``requested``). A prompt may
push its own blocks out while it comes in, which block by block would look like misses, to LRU too. What a prompt finds
less than LRU would are blocks that are behind, provided that no head is gone whose tails are here; they stop counting
as behind then and there, because the loss is counted. Should a prompt lose more than the blocks that are missing of it
(ids that aren't chained), each missing block is held capable of as much from then on. An owner that never tells of
prompts has its uses counted one by one instead, a block as one token.

An owner that makes room for a whole prompt at once misses as many blocks for a moment, but LRU would give up as many.
Where the owner names the newcomers of a prompt that it told of, the ghost lets LRU's oldest leave before the victims
are chosen (``make_way``). Without that every long prompt brings the guard to its limit: at 5,859 blocks of a public
chat trace the policy then finds 12 % more than LRU instead of 23 %.

In caches of more blocks than ``EXACT_BLOCKS`` only every 2^n-th key is followed, chosen by its hash, and the guarantee
is that of a sample.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Final

from kvcontrol.kv_policy.eviction import ContentKey

EXACT_BLOCKS: Final = 1 << 18
_MIX: Final = 0x9E3779B97F4A7C15
_BITS: Final = (1 << 64) - 1


def sampling_shift(blocks: int, most: int) -> int:
    """Return the n for which a sample of every 2^n-th of ``blocks`` has at most ``most``."""
    return max(0, (-(-blocks // most) - 1).bit_length())


def sampled(key: ContentKey, shift: int) -> bool:
    """Whether a key is in the sample of every 2^shift-th; the same keys at all times in one process."""
    if not shift:
        return True
    mixed = (hash(key) * _MIX) & _BITS
    return not ((mixed ^ mixed >> 29) * _MIX & _BITS) >> (64 - shift)


class LruGhost:
    """See the module's text. It follows the changes of the real cache, each call O(1) amortised a block."""

    __slots__ = (
        "_awaited",
        "_block_tokens",
        "_knows_prompt",
        "_leaving",
        "_line",
        "_lost",
        "_resident",
        "_severity",
        "_shift",
        "behind",
        "hits",
        "lru_hits",
    )

    def __init__(self, capacity_blocks: int) -> None:
        self._shift = sampling_shift(capacity_blocks, EXACT_BLOCKS)
        self._line: OrderedDict[ContentKey, None] = OrderedDict()
        self._leaving: OrderedDict[ContentKey, None] = OrderedDict()
        """What LRU gives up for newcomers that are awaited, older than all of the line."""
        self._awaited = 0
        self._resident: set[ContentKey] = set()
        self._lost: set[ContentKey] = set()
        """Of the present prompt: what LRU would have found and the cache didn't, until it comes in."""
        self._knows_prompt = False
        self._block_tokens = 1
        self._severity = 1.0
        """How many blocks of a prompt one that is missing may cost: 1 where no head goes before its tails."""
        self.hits = 0
        """Tokens found, or uses where nobody tells of prompts."""
        self.lru_hits = 0
        self.behind = 0
        """How many keys of the line the real cache doesn't have, beyond those whose loss is counted already."""

    def most_behind(self, share: float) -> float:
        """Return the number that ``behind`` must stay below for one more step away from LRU's order to keep the
        promise. What is chosen to go doesn't change it.
        """
        return (self.hits - self.lru_hits + share * self.lru_hits) // (self._severity * self._block_tokens)

    def requested(self, prompt: Sequence[ContentKey], block_tokens: int, prompt_tokens: int) -> None:
        """A prompt came, of which nothing is touched yet."""
        if not self._knows_prompt:
            self._knows_prompt = True
            self.hits = self.lru_hits = 0
        self._block_tokens = max(self._block_tokens, block_tokens)
        self.behind += sum(key in self._line for key in self._lost)  # of the prompt before, if not all of it came
        self._lost.clear()
        if self._shift:
            prompt = [key for key in prompt if sampled(key, self._shift)]
        ours = _leading(prompt, self._resident)
        lru = _leading(prompt, self._line, self._leaving)
        self.hits += min(ours * block_tokens, prompt_tokens)
        self.lru_hits += min(lru * block_tokens, prompt_tokens)
        if lru > ours:
            missing = [key for key in prompt[ours:lru] if key not in self._resident]
            self._severity = max(self._severity, (lru - ours) / len(missing))
            self._lost.update(missing)
            self.behind -= sum(key in self._line for key in self._lost)

    def make_way(self, blocks: int, capacity: int) -> None:
        """Follow a demand for ``blocks`` of a cache of ``capacity``, for newcomers of the prompt that was told.

        LRU would be asked for as many, but for those of the prompt that it has. Until they come the oldest of its line
        are *leaving*: they are not missed any more. One returns for each newcomer that LRU turns out to have.
        """
        self._awaited = max(0, (blocks >> self._shift) - len(self._lost))
        self._let_leave(capacity)

    def came(self, key: ContentKey, capacity: int) -> None:
        """A key that was not resident is now, in a cache with room for so many."""
        if self._shift and not sampled(key, self._shift):
            return
        is_second = key in self._resident  # two blocks of one content count as one
        self._resident.add(key)
        if key in self._lost:
            self._lost.remove(key)
        else:
            self._awaited = max(0, self._awaited - 1)
            self.behind -= key in self._line and not is_second
        if key in self._line or key in self._leaving:
            self._count(0, 1)
        self._renew(key)
        self._fit(capacity)

    def used(self, key: ContentKey, capacity: int) -> None:
        """A resident key was used."""
        if self._shift and not sampled(key, self._shift):
            return
        if key in self._line:
            self._count(1, 1)
            self._line.move_to_end(key)
            return
        self._count(1, 1 if key in self._leaving else 0)
        self._renew(key)
        self._fit(capacity)

    def refreshed(self, key: ContentKey, capacity: int) -> None:
        """A resident key became recent without a use, as when it is held no more: LRU would have it too."""
        if key in self._resident:
            self._renew(key)
            self._fit(capacity)

    def went(self, keys: Iterable[ContentKey]) -> None:
        """The real cache chose keys to go; each may be one more that it is behind."""
        resident, line, behind = self._resident, self._line, self.behind
        for key in keys:
            if key in resident:
                resident.remove(key)
                if key in line:
                    behind += 1
        self.behind = behind

    def lost(self, key: ContentKey) -> None:
        """A resident key went for another reason: LRU would have lost it too."""
        if key in self._resident:
            self._resident.remove(key)
            self._line.pop(key, None)
            self._leaving.pop(key, None)

    def _count(self, hits: int, lru_hits: int) -> None:
        if not self._knows_prompt:
            self.hits += hits
            self.lru_hits += lru_hits

    def _renew(self, key: ContentKey) -> None:
        self._leaving.pop(key, None)
        self._line[key] = None
        self._line.move_to_end(key)

    def _fit(self, capacity: int) -> None:
        line, leaving = self._line, self._leaving
        most = max(1, capacity >> self._shift)
        while len(line) + len(leaving) > most:
            if leaving:
                key, _ = leaving.popitem(last=False)
            else:
                key, _ = line.popitem(last=False)
                self.behind -= self._is_missed(key)
            self._lost.discard(key)
        self._let_leave(capacity)

    def _let_leave(self, capacity: int) -> None:
        line, leaving = self._line, self._leaving
        there = len(line) + len(leaving)
        wanted = min(there, max(0, there + self._awaited - max(1, capacity >> self._shift)))
        while len(leaving) < wanted:
            key, _ = line.popitem(last=False)
            leaving[key] = None
            self.behind -= self._is_missed(key)
        while len(leaving) > wanted:
            key, _ = leaving.popitem()
            line[key] = None
            line.move_to_end(key, last=False)
            self.behind += self._is_missed(key)

    def _is_missed(self, key: ContentKey) -> bool:
        return key not in self._resident and key not in self._lost


def _leading(prompt: Sequence[ContentKey], there: Container[ContentKey], also: Container[ContentKey] = ()) -> int:
    for place, key in enumerate(prompt):
        if key not in there and key not in also:
            return place
    return len(prompt)
