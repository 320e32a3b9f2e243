"""LRU-2 (O'Neil, O'Neil and Weikum, SIGMOD 1993): the block whose second-last use lies furthest back goes first.

A block that was used once has no second-last use, and counts as if it were before all time; among equals the last use
decides. So a block has to prove by a second use, however late, that it is worth keeping. The time of the last use is
remembered for blocks that have left: one that comes back has its second-last use at once.

Blocks used once stand in an LRU line. The others are in a heap, each once, ordered by (second-last, last) use at the
time when it was put there; as both only grow, whoever comes to the top with an old order is put back with the true one.
Held blocks stand outside: they leave the heap when they come to its top. Every hook is O(log n) a block amortised, in C
code; LRU-2 has no O(1) form (2Q and MQ were invented for that). Releasing is a last use, not a further one. A head
whose second-last use came just before its tail did may go first.

The history is the largest of all policies': ``history_blocks`` keys, the paper's being endless.
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.base import PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey
from kvcontrol.kv_policy.ghost import GhostList


class _Entry:
    __slots__ = ("before", "key", "last", "queued")

    def __init__(self, key: ContentKey | None, before: int, last: int) -> None:
        self.key = key
        self.before = before
        """Time of the second-last use; 0 is before all time."""
        self.last = last
        self.queued = False
        """Whether the heap has it."""


class Lru2Policy(PathPolicy[_Entry]):
    """See the module's text."""

    name = "lru2"
    reason = "lru2: second-last use longest ago"
    tails_first = False

    def __init__(self, *, history_blocks: int = 1 << 20) -> None:
        super().__init__()
        self._now = 0
        self._once: OrderedDict[BlockId, None] = OrderedDict()
        self._heap: list[tuple[int, int, BlockId, _Entry]] = []
        self._stale = 0
        """Places in the heap of blocks that were removed."""
        self._history: GhostList[int] = GhostList(history_blocks)

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        self._now += 1
        before = (key is not None and self._history.take(key)) or 0
        entry = self._entries[block] = _Entry(key, before, self._now)
        self._join(block, entry)

    def _touch(self, block: BlockId) -> None:
        self._now += 1
        entry = self._entries[block]
        if not entry.before and block not in self._holds:
            del self._once[block]
        entry.before, entry.last = entry.last, self._now
        if block not in self._holds:
            self._join(block, entry)

    def _park(self, block: BlockId) -> None:
        if not self._entries[block].before:
            del self._once[block]

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            self._now += 1
            entry = self._entries[block]
            entry.last = self._now
            self._join(block, entry)

    def _drop(self, block: BlockId) -> None:
        entry = self._entries[block]
        if not entry.before and block not in self._holds:
            del self._once[block]
        self._remember(entry)
        entry.last = 0  # what the heap has of it counts for nothing
        if entry.queued:
            self._stale += 1
            if self._stale > len(self._entries):
                self._heap = [place for place in self._heap if place[3].last]
                heapify(self._heap)
                self._stale = 0

    def _choose(self, incoming: ContentKey | None) -> BlockId | None:  # noqa: ARG002 - it remembers at the insertion
        if self._once:
            block, _ = self._once.popitem(last=False)
            entry = self._entries.pop(block)
        else:
            top = self._oldest()
            if top is None:
                return None
            block, entry = top
            del self._entries[block]
        self._remember(entry)
        return block

    def _remember(self, entry: _Entry) -> None:
        if entry.key is not None:
            self._history.put(entry.key, entry.last)

    def _oldest(self) -> tuple[BlockId, _Entry] | None:
        heap, holds = self._heap, self._holds
        while heap:
            before, last, block, entry = heap[0]
            if not entry.last:
                heappop(heap)
                self._stale -= 1
            elif block in holds:
                heappop(heap)
                entry.queued = False
            elif entry.before == before and entry.last == last:
                heappop(heap)
                return block, entry
            else:
                heapreplace(heap, (entry.before, entry.last, block, entry))
        return None

    def _join(self, block: BlockId, entry: _Entry) -> None:
        if not entry.before:
            self._once[block] = None
        elif not entry.queued:
            entry.queued = True
            heappush(self._heap, (entry.before, entry.last, block, entry))


__all__ = ["Lru2Policy"]
