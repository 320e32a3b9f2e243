"""FIFO: evicts the oldest block, however often it was used.

All blocks stand in one line in the order in which they came, the tail of a path before its head. Uses change nothing.
The victim is the first in line. A held block that has come to the front steps aside, so that nobody looks at it twice,
and steps back to the front when it is released: its turn had come. A prompt that grows brings new tails behind an old
head, so FIFO gives up heads whose tails stay; who serves prefixes has to put them back or lose the tails too. Every
hook is a dictionary operation: O(1) a block.

It is the floor that the others are measured against, and the cheapest of all.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.base import OLDEST, PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey


class FifoPolicy(PathPolicy[None]):
    """First in, first out (see the module's text)."""

    name = "fifo"
    reason = "fifo: came first"
    tails_first = False
    counts_uses = False

    def __init__(self) -> None:
        super().__init__()
        self._line: OrderedDict[BlockId, None] = OrderedDict()

    def _add(self, block: BlockId, key: ContentKey | None) -> None:  # noqa: ARG002 - FIFO remembers nothing
        self._entries[block] = None
        self._line[block] = None

    def _touch(self, block: BlockId) -> None:
        pass

    def _park(self, block: BlockId) -> None:
        pass  # it steps aside when its turn comes

    def _unpark(self, path: Sequence[BlockId]) -> None:
        line = self._line
        for block in path:  # a tail comes to stand before its head
            if block not in line:
                line[block] = None
                line.move_to_end(block, last=False)

    def _drop(self, block: BlockId) -> None:
        self._line.pop(block, None)

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:  # noqa: ARG002
        victims: list[BlockId] = []
        line, holds, entries = self._line, self._holds, self._entries
        while line and len(victims) < wanted:
            block, _ = line.popitem(OLDEST)
            if block not in holds:
                del entries[block]
                victims.append(block)
        return victims
