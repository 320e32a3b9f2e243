"""ARC (Megiddo and Modha, FAST 2003): two LRU lines that grow at each other's cost, as what comes back teaches.

T1 holds blocks seen once of late, T2 those seen at least twice; a use moves a block to the young end of T2. B1 and B2
remember the keys of what T1 and T2 gave up; T1 and B1 have room for c together, all four for 2c. ``p`` is the size that
T1 should have. A block that comes back from B1 was given up too early, so p grows, by the larger of 1 and |B2| / |B1|;
from B2, it shrinks likewise; both enter T2. The victim is the oldest of T1 if T1 is larger than p (or as large, and the
newcomer is in B2), else the oldest of T2. If T1 alone fills its room, its oldest goes without being remembered.

p is learnt before the victim is chosen, from ``PolicyContext.incoming``; where nobody says what comes, at the
insertion. Held blocks stand outside, count in their line, and return to its young end. A head may go before its tail,
as they may stand in different lines. Every hook is O(1) a block.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import check_capacity, check_keys
from kvcontrol.kv_policy.base import OLDEST, PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey
from kvcontrol.kv_policy.ghost import GhostList


class _Entry:
    __slots__ = ("key", "often")

    def __init__(self, key: ContentKey | None, often: bool) -> None:  # noqa: FBT001 - made in one place
        self.key = key
        self.often = often


class ArcPolicy(PathPolicy[_Entry]):
    """Adaptive replacement (see the module's text) in ``capacity_blocks``, the paper's c."""

    name = "arc"
    reason = "arc: oldest of the line that is larger than it should be"
    tails_first = False

    def __init__(self, capacity_blocks: int) -> None:
        check_capacity(capacity_blocks)
        super().__init__()
        self._c = capacity_blocks
        self._p = 0.0
        self._once: OrderedDict[BlockId, _Entry] = OrderedDict()
        self._often: OrderedDict[BlockId, _Entry] = OrderedDict()
        self._once_size = 0
        """|T1|, held ones included; |T2| is the rest of the entries."""
        self._gone_once: OrderedDict[ContentKey, None] = OrderedDict()
        """B1, of which ``_trim`` and ``_choose`` keep the size; so with B2."""
        self._gone_often: OrderedDict[ContentKey, None] = OrderedDict()
        self._returning: GhostList[bool] = GhostList(capacity_blocks)
        """What was learnt from already, before its insertion."""

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        often = key is not None and (self._returning.take(key) is not None or self._learn(key) is not None)
        entry = self._entries[block] = _Entry(key, often)
        if often:
            self._often[block] = entry
        else:
            self._once[block] = entry
            self._once_size += 1
        self._trim()

    def _touch(self, block: BlockId) -> None:
        entry = self._entries[block]
        held = block in self._holds
        if entry.often:
            if not held:
                self._often.move_to_end(block)
            return
        entry.often = True
        self._once_size -= 1
        if not held:
            del self._once[block]
            self._often[block] = entry

    def _park(self, block: BlockId) -> None:
        del (self._often if self._entries[block].often else self._once)[block]

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            entry = self._entries[block]
            (self._often if entry.often else self._once)[block] = entry

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            self._park(block)
        if not self._entries[block].often:
            self._once_size -= 1

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:
        victims: list[BlockId] = []
        once, often, gone_once, gone_often = self._once, self._often, self._gone_once, self._gone_often
        entries, c, once_size = self._entries, self._c, self._once_size
        known = len(incoming) if wanted <= 1 else _known_count(incoming)
        for place in range(wanted):
            coming = incoming[place] if place < known else None
            came_from = None
            if coming in gone_once or coming in gone_often:
                came_from = self._learn(coming)
                self._returning.put(coming, True)  # noqa: FBT003 - a value that nobody reads
            elif once_size >= c and once:
                block, _ = once.popitem(OLDEST)  # without being remembered
                once_size -= 1
                del entries[block]
                victims.append(block)
                continue
            elif once_size + len(gone_once) >= c:
                if gone_once:
                    gone_once.popitem(OLDEST)
            elif gone_often and len(entries) + len(gone_once) + len(gone_often) >= 2 * c:
                gone_often.popitem(OLDEST)
            if once and (not often or once_size > self._p or (came_from and once_size == self._p)):
                block, entry = once.popitem(OLDEST)
                once_size -= 1
                gone = gone_once
            elif often:
                block, entry = often.popitem(OLDEST)
                gone = gone_often
            else:
                break
            del entries[block]
            victims.append(block)
            key = entry.key
            if key is not None:
                gone[key] = None
                gone.move_to_end(key)  # another block of the same content may have gone before
        self._once_size = once_size
        return victims

    def _learn(self, key: ContentKey) -> bool | None:
        """Move p by a key that comes back; return whether it had been seen often, None if it isn't remembered."""
        if key in self._gone_once:
            self._p = min(float(self._c), self._p + max(1.0, len(self._gone_often) / len(self._gone_once)))
            del self._gone_once[key]
            return False
        if key in self._gone_often:
            self._p = max(0.0, self._p - max(1.0, len(self._gone_once) / len(self._gone_often)))
            del self._gone_often[key]
            return True
        return None

    def _trim(self) -> None:
        """Keep the memory within its bounds where blocks come without anybody's having asked for room."""
        once, often = self._gone_once, self._gone_often
        while once and self._once_size + len(once) > self._c:
            once.popitem(OLDEST)
        while often and len(self._entries) + len(once) + len(often) > 2 * self._c:
            often.popitem(OLDEST)


def _known_count(incoming: Sequence[ContentKey]) -> int:
    """Return how many keys come, which can all be looked for; where one does, that is seen before anything changes."""
    check_keys(incoming)
    return len(incoming)
