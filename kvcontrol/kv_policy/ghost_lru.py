"""What an LRU cache in a policy's place would hold and find, so that the policy knows what it risks and what it gains.

The shadow gets the same uses and the same room as the real cache. LRU has a property that makes this a guarantee: what
it holds are the blocks used last, so a cache that begins to evict in LRU's order first loses all that LRU would not
hold. Whatever the policy did before, from then on it can miss at most the ``behind`` blocks that LRU holds and it
doesn't, each once. So as long as

    lead + share x LRU's hits  >=  behind        (lead: hits more than LRU's, so far)

is true whenever another order than LRU's is followed, hits are never below (1 - share) of LRU's, at no moment of no
workload. In caches of more blocks than ``EXACT_BLOCKS`` only every 2^n-th key is followed, chosen by its hash, and the
guarantee is that of a sample.
"""

from collections import OrderedDict
from typing import Final

from kvcontrol.kv_policy.eviction import ContentKey

EXACT_BLOCKS: Final = 1 << 17
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
    """See the module's text. It is told of what the real cache does, each call O(1) amortised."""

    __slots__ = ("_line", "_resident", "_shift", "behind", "hits", "lru_hits")

    def __init__(self, capacity_blocks: int) -> None:
        self._shift = sampling_shift(capacity_blocks, EXACT_BLOCKS)
        self._line: OrderedDict[ContentKey, None] = OrderedDict()
        self._resident: set[ContentKey] = set()
        self.hits = 0
        self.lru_hits = 0
        self.behind = 0
        """How many keys LRU would hold that the real cache doesn't."""

    def may_risk(self, share: float) -> bool:
        """Whether one more step away from LRU's order keeps the promise."""
        return self.behind < self.hits - self.lru_hits + share * self.lru_hits

    def came(self, key: ContentKey, room: int) -> None:
        """A key that was not resident is now, in a cache with room for so many."""
        if self._shift and not sampled(key, self._shift):
            return
        is_second = key in self._resident  # two blocks of one content count as one
        self._resident.add(key)
        if key in self._line:
            self.behind -= not is_second
            self.lru_hits += 1
            self._line.move_to_end(key)
        else:
            self._line[key] = None
            self._fit(room)

    def used(self, key: ContentKey, room: int) -> None:
        """A resident key was used."""
        if self._shift and not sampled(key, self._shift):
            return
        self.hits += 1
        if key in self._line:
            self.lru_hits += 1
            self._line.move_to_end(key)
        else:
            self._line[key] = None
            self._fit(room)

    def refreshed(self, key: ContentKey) -> None:
        """A resident key became recent without a use."""
        if key in self._line:
            self._line.move_to_end(key)

    def went(self, key: ContentKey) -> None:
        """The real cache chose a key to go."""
        if key in self._resident:
            self._resident.remove(key)
            self.behind += key in self._line

    def lost(self, key: ContentKey) -> None:
        """A resident key went for another reason: LRU would have lost it too."""
        if key in self._resident:
            self._resident.remove(key)
            self._line.pop(key, None)

    def _fit(self, room: int) -> None:
        line = self._line
        while len(line) > max(1, room >> self._shift):
            key, _ = line.popitem(last=False)
            self.behind -= key not in self._resident


__all__ = ["EXACT_BLOCKS", "LruGhost", "sampled", "sampling_shift"]
