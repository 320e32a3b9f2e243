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
from kvcontrol.kv_policy.base import PathPolicy
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
        super().__init__()
        self._c = capacity_blocks
        self._p = 0.0
        self._once: OrderedDict[BlockId, None] = OrderedDict()
        self._often: OrderedDict[BlockId, None] = OrderedDict()
        self._once_size = 0
        """|T1|, held ones included; |T2| is the rest of the entries."""
        self._ghosts_once: GhostList[bool] = GhostList(2 * capacity_blocks)
        self._ghosts_often: GhostList[bool] = GhostList(2 * capacity_blocks)
        self._returning: GhostList[bool] = GhostList(capacity_blocks)
        """What was learnt from already, before its insertion."""

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        often = key is not None and (self._returning.take(key) is not None or self._learn(key) is not None)
        self._entries[block] = _Entry(key, often)
        if often:
            self._often[block] = None
        else:
            self._once[block] = None
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
            self._often[block] = None

    def _park(self, block: BlockId) -> None:
        del (self._often if self._entries[block].often else self._once)[block]

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            (self._often if self._entries[block].often else self._once)[block] = None

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            self._park(block)
        if not self._entries[block].often:
            self._once_size -= 1

    def _choose(self, incoming: ContentKey | None) -> BlockId | None:
        came_from = None if incoming is None else self._learn(incoming)
        if came_from is None:
            return self._make_room()
        self._returning.put(incoming, True)  # noqa: FBT003 - a value that nobody reads
        return self._replace(from_often=came_from)

    def _learn(self, key: ContentKey) -> bool | None:
        """Move p by a key that comes back; return whether it had been seen often, None if it isn't remembered."""
        once, often = len(self._ghosts_once), len(self._ghosts_often)
        if self._ghosts_once.take(key) is not None:
            self._p = min(float(self._c), self._p + max(1.0, often / once))
            return False
        if self._ghosts_often.take(key) is not None:
            self._p = max(0.0, self._p - max(1.0, once / often))
            return True
        return None

    def _make_room(self) -> BlockId | None:
        """Choose for a newcomer that isn't remembered (case IV of the paper)."""
        if self._once_size >= self._c and self._once:
            return self._take(self._once)
        if self._once_size + len(self._ghosts_once) >= self._c:
            if len(self._ghosts_once):
                self._ghosts_once.forget_oldest()
        elif len(self._entries) + len(self._ghosts_once) + len(self._ghosts_often) >= 2 * self._c and len(
            self._ghosts_often
        ):
            self._ghosts_often.forget_oldest()
        return self._replace(from_often=False)

    def _replace(self, *, from_often: bool) -> BlockId | None:
        once, often = self._once, self._often
        large = self._once_size > self._p or (from_often and self._once_size == self._p)
        line, ghosts = (once, self._ghosts_once) if (large and once) or not often else (often, self._ghosts_often)
        if not line:
            return None
        key = self._entries[next(iter(line))].key
        if key is not None:
            ghosts.put(key, True)  # noqa: FBT003
        return self._take(line)

    def _take(self, line: OrderedDict[BlockId, None]) -> BlockId:
        block, _ = line.popitem(last=False)
        if line is self._once:
            self._once_size -= 1
        del self._entries[block]
        return block

    def _trim(self) -> None:
        """Keep the memory within its bounds where blocks come without anybody's having asked for room."""
        while len(self._ghosts_once) and self._once_size + len(self._ghosts_once) > self._c:
            self._ghosts_once.forget_oldest()
        while (
            len(self._ghosts_often)
            and len(self._entries) + len(self._ghosts_once) + len(self._ghosts_often) > 2 * self._c
        ):
            self._ghosts_often.forget_oldest()


__all__ = ["ArcPolicy"]
