"""LFU: the block that was used least often since it came goes first; among equals, the one used longest ago.

Blocks with equally many uses stand in one line, youngest use last. A use moves a block to the young end of the next
line. The victim is the first of the lowest line that has anybody in it. Which line that is, a heap of the lines'
numbers knows: a number enters it when its line gets its first block and leaves it when somebody looks and finds the
line empty, so each look is paid for by an arrival. Held blocks stand outside and return to the young end of their line.
What left is forgotten: a block that comes again starts at one. Every hook is O(1) a block, and O(log k) when one of k
lines fills.

It keeps what was popular long ago for ever (nothing ages); on growing chats LRU beats it as soon as the cache is large.
Rejected: a search for the next line that isn't empty (uses may differ by millions), a heap of blocks (O(log n)).
"""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.base import PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey


class LfuPolicy(PathPolicy[int]):
    """Least frequently used while resident (see the module's text); an entry is a block's number of uses."""

    name = "lfu"
    reason = "lfu: used least often"
    tails_first = True

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, OrderedDict[BlockId, None]] = {}
        self._lowest: list[int] = []

    def _add(self, block: BlockId, key: ContentKey | None) -> None:  # noqa: ARG002 - LFU remembers nothing
        self._entries[block] = 1
        self._join(block, 1)

    def _touch(self, block: BlockId) -> None:
        uses = self._entries[block]
        self._entries[block] = uses + 1
        if block not in self._holds:
            del self._lines[uses][block]
            self._join(block, uses + 1)

    def _park(self, block: BlockId) -> None:
        del self._lines[self._entries[block]][block]

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            self._join(block, self._entries[block])

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            del self._lines[self._entries[block]][block]

    def _choose(self, incoming: ContentKey | None) -> BlockId | None:  # noqa: ARG002
        lowest = self._lowest
        while lowest:
            line = self._lines[lowest[0]]
            if line:
                block, _ = line.popitem(last=False)
                del self._entries[block]
                return block
            del self._lines[heappop(lowest)]
        return None

    def _join(self, block: BlockId, uses: int) -> None:
        line = self._lines.get(uses)
        if line is None:
            line = self._lines[uses] = OrderedDict()
            heappush(self._lowest, uses)
        line[block] = None


__all__ = ["LfuPolicy"]
