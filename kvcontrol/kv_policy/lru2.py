"""LRU-2 (O'Neil, O'Neil and Weikum, SIGMOD 1993): evicts the block whose second-last use is oldest.

A block that was used once has no second-last use, and counts as if it were before all time; among equals the last use
decides. So a block has to prove by a second use, however late, that it is worth keeping. The time of the last use is
remembered for blocks that have left: one that comes back has its second-last use at once.

A clock counts uses. Blocks used once stand in an LRU line and go first. The others are kept by their second-last uses,
128 ticks of the clock to a bucket; the victim is the oldest of the lowest bucket, and a use moves a block to another.
Held blocks stand outside. Releasing is a last use, not a further one. Every hook is O(1) a block, and O(log k) when one
of k buckets gets its first block (see ``buckets``); choosing looks at the at most 128 of one bucket.

A head whose second-last use came just before its tail did may go first. The history is the largest of all policies':
``history_blocks`` keys, the paper's being endless. Rejected: a heap of blocks, which are in the wrong place after each
use (putting them right took 100 ms at once, where it was put off).
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import check_whole
from kvcontrol.kv_policy.base import OLDEST, PathPolicy
from kvcontrol.kv_policy.buckets import Buckets
from kvcontrol.kv_policy.eviction import ContentKey
from kvcontrol.kv_policy.ghost import GhostList

_SPAN_BITS = 7


class _Entry:
    __slots__ = ("before", "key", "last")

    def __init__(self, key: ContentKey | None, before: int, last: int) -> None:
        self.key = key
        self.before = before
        """Time of the second-last use; 0 is before all time."""
        self.last = last


class Lru2Policy(PathPolicy[_Entry]):
    """See the module's text."""

    name = "lru2"
    reason = "lru2: second-last use longest ago"
    tails_first = False

    def __init__(self, *, history_blocks: int = 1 << 20) -> None:
        check_whole("history_blocks", history_blocks)
        super().__init__()
        self._now = 0
        self._once: OrderedDict[BlockId, None] = OrderedDict()
        self._again: Buckets[int, BlockId] = Buckets()
        self._history: GhostList[int] = GhostList(history_blocks)

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        self._now += 1
        before = (key is not None and self._history.take(key)) or 0
        entry = self._entries[block] = _Entry(key, before, self._now)
        self._join(block, entry)

    def _touch(self, block: BlockId) -> None:
        self._now += 1
        entry = self._entries[block]
        held = block in self._holds
        if not held:
            self._park(block)
        entry.before, entry.last = entry.last, self._now
        if not held:
            self._join(block, entry)

    def _park(self, block: BlockId) -> None:
        before = self._entries[block].before
        if before:
            self._again.take(before >> _SPAN_BITS, before)
        else:
            del self._once[block]

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            self._now += 1
            entry = self._entries[block]
            entry.last = self._now
            self._join(block, entry)

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            self._park(block)
        self._part([self._entries[block]])

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:  # noqa: ARG002
        victims: list[BlockId] = []
        once, again = self._once, self._again
        while once and len(victims) < wanted:
            victims.append(once.popitem(OLDEST)[0])
        while len(victims) < wanted and (lowest := again.lowest()):
            span, blocks = lowest
            left = wanted - len(victims)
            oldest = sorted(blocks)[:left] if left > 1 else (min(blocks),)
            victims += [again.take(span, before) for before in oldest]
        self._parted += map(self._entries.pop, victims)
        return victims

    def _part(self, entries: list[_Entry]) -> None:
        for entry in entries:
            if entry.key is not None:
                self._history.put(entry.key, entry.last)

    def _join(self, block: BlockId, entry: _Entry) -> None:
        if entry.before:
            self._again.put(entry.before >> _SPAN_BITS, entry.before, block)
        else:
            self._once[block] = None
