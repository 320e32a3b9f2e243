"""LFU: evicts the block with the fewest uses; among equals, the least recently used.

Blocks with equally many uses stand in one line, youngest use last. A use moves a block to the young end of the next
line. The victim is the first of the lowest line that has anybody in it. Held blocks stand outside and return to the
young end of their line. What left is forgotten: a block that comes again starts at one. Every hook is O(1) a block, and
O(log k) when one of k lines gets its first block (see ``buckets``).

It keeps what was popular long ago for ever (nothing ages); on growing chats LRU beats it as soon as the cache is large.
Rejected: a search for the next line that isn't empty (uses may differ by millions), a heap of blocks (O(log n)).
"""

from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.base import PathPolicy
from kvcontrol.kv_policy.buckets import Buckets
from kvcontrol.kv_policy.eviction import ContentKey


class LfuPolicy(PathPolicy[int]):
    """Least frequently used while resident (see the module's text); an entry is a block's number of uses."""

    name = "lfu"
    reason = "lfu: used least often"
    tails_first = True

    def __init__(self) -> None:
        super().__init__()
        self._lines: Buckets[BlockId, None] = Buckets()

    def _add(self, block: BlockId, key: ContentKey | None) -> None:  # noqa: ARG002 - LFU remembers nothing
        self._entries[block] = 1
        self._lines.put(1, block, None)

    def _touch(self, block: BlockId) -> None:
        uses = self._entries[block]
        self._entries[block] = uses + 1
        if block not in self._holds:
            self._lines.take(uses, block)
            self._lines.put(uses + 1, block, None)

    def _park(self, block: BlockId) -> None:
        self._lines.take(self._entries[block], block)

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            self._lines.put(self._entries[block], block, None)

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            self._park(block)

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:  # noqa: ARG002
        victims: list[BlockId] = []
        entries = self._entries
        while (left := wanted - len(victims)) > 0 and (lowest := self._lines.take_lowest(left)):
            for block, _ in lowest[1]:
                del entries[block]
                victims.append(block)
        return victims
