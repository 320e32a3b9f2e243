"""Predictive: evicts the block with the lowest expected use, by the lifetimes of similar blocks.

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
from kvcontrol.kv_policy.allowed import MOST_CAPACITIES, check_capacity, check_number
from kvcontrol.kv_policy.base import OLDEST, PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey
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
        check_capacity(capacity_blocks)
        check_number("ghosts", ghosts, most=MOST_CAPACITIES)
        check_number("patience", patience, above=0, most=MOST_CAPACITIES)
        super().__init__()
        self._now = 0
        self._lines: tuple[OrderedDict[BlockId, _Entry], ...] = tuple(OrderedDict() for _ in range(CLASSES))
        self._ghosts: GhostList[_Entry] = GhostList(int(ghosts * capacity_blocks))
        self._forgotten: list[_Entry] = []
        """Ghosts that made way, which the table hasn't been told of."""
        self._fronts: list[BlockId | None] = [None] * CLASSES
        """Each line's first block, where it is known what is to be expected of it."""
        self._lasts = [0] * CLASSES
        """When the fronts were used last (reads of cold memory saved)."""
        self._expected = [_NONE_THERE] * CLASSES
        """Of the fronts, at the table's ``_version``, until ticks that follow."""
        self._untils: list[float] = [_NONE_THERE] * CLASSES
        self._until = _NONE_THERE
        """The first of these."""
        self._version = 0
        self._versions = [0] * CLASSES
        self._unqueried: set[int] = set()
        """Lines that may have a first block of which nobody has asked."""
        self._ages = [(0, 0, 0.0)] * CLASSES
        """Of each line: ages from and below, that share a bucket of the table, and what is expected of them."""
        self._table = ReuseTable(CLASSES, patience=int(patience * capacity_blocks), window=16 * capacity_blocks)

    def insert(self, path: Sequence[BlockId], keys: Sequence[ContentKey] = ()) -> None:
        """See ``EvictionPolicy``. What the table learns of victims is done here, not by who waits for a victim: each
        choice is followed by an insertion. So is what it is asked of who is next, here and in other hooks.
        """
        if self._parted:
            self._settle()
        for entry in self._forgotten:
            self._table.ended(class_of(entry.uses), entry.last, self._now)
        self._forgotten.clear()
        super().insert(path, keys)
        if self._is_outdated():
            self._look()

    def access(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        super().access(path)
        if self._is_outdated():
            self._look()

    def hold(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        super().hold(path)
        if self._is_outdated():
            self._look()

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        self._now += 1
        known = None if key is None else self._ghosts.take(key)
        uses = 1
        if known is not None:
            self._table.used(class_of(known.uses), known.last, self._now)
            uses = known.uses + 1
        entry = self._entries[block] = _Entry(key, uses, self._now)
        klass = class_of(uses)
        self._table.begun(klass, self._now)
        self._stand(block, entry, klass)

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
            self._stand(block, entry, after)

    def _park(self, block: BlockId) -> None:
        self._leave(block, class_of(self._entries[block].uses))

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            entry = self._entries[block]
            self._stand(block, entry, class_of(entry.uses))

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            self._park(block)
        entry = self._entries[block]
        self._part([entry])

    def _part(self, entries: list[_Entry]) -> None:
        for entry in entries:
            forgotten: _Entry | None = entry
            if entry.key is not None:
                forgotten = self._ghosts.put(entry.key, entry)
            if forgotten is not None:
                self._forgotten.append(forgotten)

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:  # noqa: ARG002
        victims: list[BlockId] = []
        if self._is_outdated():
            self._look()
        entries, expected, part, now = self._entries, self._expected, self._parted.append, self._now
        while len(victims) < wanted:
            if self._unqueried:
                self._ask_all()
            least = min(expected)
            if least == _NONE_THERE:
                break
            klass = expected.index(least)
            line = self._lines[klass]
            start, end, _ = self._ages[klass]
            while True:
                block, entry = line.popitem(OLDEST)
                del entries[block]
                victims.append(block)
                part(entry)
                if len(victims) == wanted or not line:
                    break
                if not start <= now - line[next(iter(line))].last < end:
                    break  # of the next in line something else is to be expected
            self._fronts[klass] = None
            expected[klass] = _NONE_THERE
            self._unqueried.add(klass)
        return victims

    def _is_outdated(self) -> bool:
        return bool(self._unqueried) or self._now >= self._until or self._version != self._table.version

    def _look(self) -> None:
        """Compute the expected use of each line's front, where it is unknown."""
        now, version = self._now, self._table.version
        if self._version != version:
            self._version = version
            for klass, (queried, worked_out) in enumerate(zip(self._versions, self._table.versions, strict=True)):
                if queried != worked_out:
                    self._versions[klass] = worked_out
                    self._ages[klass] = (0, 0, 0.0)
                    self._unqueried.add(klass)
        if now >= self._until:
            self._unqueried.update([klass for klass, until in enumerate(self._untils) if now >= until])
        self._ask_all()
        self._until = min(self._untils)

    def _ask_all(self) -> None:
        for klass in self._unqueried:
            self._ask(klass)
        self._unqueried.clear()

    def _ask(self, klass: int) -> None:
        """Compute the expected use of the front of a line."""
        line = self._lines[klass]
        if not line:
            self._fronts[klass] = None
            self._expected[klass] = self._untils[klass] = _NONE_THERE
            return
        if self._fronts[klass] is None:
            block = self._fronts[klass] = next(iter(line))
            self._lasts[klass] = line[block].last
        last = self._lasts[klass]
        age = self._now - last
        start, end, expected = self._ages[klass]
        if not start <= age < end:
            bucket = bucket_of(age)
            start, end, expected = start_of(bucket), start_of(bucket + 1), self._table.worth(klass, bucket)
            self._ages[klass] = (start, end, expected)
        self._expected[klass] = expected
        self._untils[klass] = last + end

    def _stand(self, block: BlockId, entry: _Entry, klass: int) -> None:
        self._lines[klass][block] = entry
        if self._fronts[klass] is None:
            self._unqueried.add(klass)

    def _leave(self, block: BlockId, klass: int) -> None:
        del self._lines[klass][block]
        if self._fronts[klass] == block:
            self._fronts[klass] = None
            self._expected[klass] = self._untils[klass] = _NONE_THERE
            self._unqueried.add(klass)


def class_of(uses: int) -> int:
    """Return the class of a block used so often: 1, 2, 3 or 4, 5 to 8, and so on."""
    return min(CLASSES - 1, (uses - 1).bit_length())
