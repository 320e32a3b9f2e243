"""Predictive: the block of which a use is to be expected least goes first, by how long blocks like it lived till now.

Blocks are of a class by how often they were used: once, twice, three or four times and so on. Each class has an LRU
line. How long its blocks go without a use is learnt from every use, and from those that stayed away (``ReuseTable``);
the keys of ``ghosts`` capacities that have left are remembered, so that the gaps of what comes back count too, and only
what is forgotten there counts as never used again. The oldest block of each line stands for the line: its class and
its age give the uses to be expected per tick of waiting, with the best end to it within ``patience`` capacities
(Gittins' index), and the least of these is the victim.

A tick is a use. Held blocks stand outside and return to the young end of their line. A head has at least as
many uses as its tails, but may stand in a line of which less is expected, so it may go first. Every hook is O(1) a
block amortised: what is asked of the lines is asked of their fronts alone, and there are eight. In the manner of LHD
(Beckmann, Chen and Cidon, NSDI 2018), which samples instead of keeping lines and doesn't look past the cache's edge.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.base import PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey, EvictionDecision, PolicyContext
from kvcontrol.kv_policy.ghost import GhostList
from kvcontrol.kv_policy.reuse_table import ReuseTable, bucket_of, start_of

CLASSES = 8
_NONE_THERE = float("inf")


class _Entry:
    __slots__ = ("key", "last", "uses")

    def __init__(self, key: ContentKey | None, uses: int, last: int) -> None:
        self.key = key
        self.uses = uses
        self.last = last


class PredictivePolicy(PathPolicy[_Entry]):
    """See the module's text; ``ghosts`` and ``patience`` are in capacities."""

    name = "predictive"
    reason = "predictive: a use is to be expected least"
    tails_first = False

    def __init__(self, capacity_blocks: int, *, ghosts: float = 4, patience: float = 3) -> None:
        super().__init__()
        self._now = 0
        self._lines: tuple[OrderedDict[BlockId, _Entry], ...] = tuple(OrderedDict() for _ in range(CLASSES))
        self._ghosts: GhostList[tuple[int, int]] = GhostList(int(ghosts * capacity_blocks))
        self._forgotten: list[tuple[int, int]] = []
        """Uses and last uses of ghosts that made way, which the table hasn't been told of."""
        self._fronts: list[BlockId | None] = [None] * CLASSES
        """Each line's first block, where it is known what is to be expected of it (a read of cold memory saved)."""
        self._expected = [_NONE_THERE] * CLASSES
        """Of the fronts, until ticks and with versions of the table that follow."""
        self._untils = [0] * CLASSES
        self._versions = [0] * CLASSES
        self._table = ReuseTable(CLASSES, patience=int(patience * capacity_blocks), window=16 * capacity_blocks)

    def insert(self, path: Sequence[BlockId], keys: Sequence[ContentKey] = ()) -> None:
        """See ``EvictionPolicy``. What the table learns of victims it learns here, so that choosing is quick."""
        for uses, last in self._forgotten:
            self._table.ended(class_of(uses), last, self._now)
        self._forgotten.clear()
        super().insert(path, keys)

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        self._now += 1
        known = None if key is None else self._ghosts.take(key)
        uses = 1
        if known is not None:
            before, last = known
            self._table.used(class_of(before), last, self._now)
            uses = before + 1
        entry = self._entries[block] = _Entry(key, uses, self._now)
        self._table.begun(class_of(uses), self._now)
        self._lines[class_of(uses)][block] = entry

    def _touch(self, block: BlockId) -> None:
        self._now += 1
        entry = self._entries[block]
        before = class_of(entry.uses)
        self._table.used(before, entry.last, self._now)
        entry.uses += 1
        entry.last = self._now
        after = class_of(entry.uses)
        self._table.begun(after, self._now)
        if block not in self._holds:
            self._leave(block, before)
            self._lines[after][block] = entry

    def _park(self, block: BlockId) -> None:
        self._leave(block, class_of(self._entries[block].uses))

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            entry = self._entries[block]
            self._lines[class_of(entry.uses)][block] = entry

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            self._park(block)
        self._remember(self._entries[block])

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """See ``EvictionPolicy``."""
        now, lines, untils, versions = self._now, self._lines, self._untils, self._table.versions
        for klass, block in enumerate(self._fronts):
            if block is None:
                if lines[klass]:
                    self._ask(klass)
            elif now >= untils[klass] or self._versions[klass] != versions[klass]:
                self._ask(klass)
        return super().select_victims(context)

    def _choose(self, incoming: ContentKey | None) -> BlockId | None:  # noqa: ARG002 - it learns at the insertion
        expected = self._expected
        least = min(expected)
        if least == _NONE_THERE:
            return None
        klass = expected.index(least)
        block, entry = self._lines[klass].popitem(last=False)
        del self._entries[block]
        self._remember(entry)
        self._ask(klass)
        return block

    def _ask(self, klass: int) -> None:
        """Find out what is to be expected of the front of a line."""
        line, table = self._lines[klass], self._table
        if not line:
            self._fronts[klass] = None
            self._expected[klass] = _NONE_THERE
            return
        block = self._fronts[klass] = next(iter(line))
        last = line[block].last
        bucket = bucket_of(self._now - last)
        self._expected[klass] = table.worth(klass, bucket)
        self._untils[klass] = last + start_of(bucket + 1)
        self._versions[klass] = table.versions[klass]

    def _leave(self, block: BlockId, klass: int) -> None:
        del self._lines[klass][block]
        if self._fronts[klass] == block:
            self._fronts[klass] = None
            self._expected[klass] = _NONE_THERE

    def _remember(self, entry: _Entry) -> None:
        forgotten: tuple[int, int] | None = (entry.uses, entry.last)
        if entry.key is not None:
            forgotten = self._ghosts.put(entry.key, (entry.uses, entry.last))
        if forgotten is not None:
            self._forgotten.append(forgotten)


def class_of(uses: int) -> int:
    """Return the class of a block used so often: 1, 2, 3 or 4, 5 to 8, and so on."""
    return min(CLASSES - 1, (uses - 1).bit_length())


__all__ = ["CLASSES", "PredictivePolicy", "class_of"]
