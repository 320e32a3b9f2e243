"""S3-FIFO (Yang and others, SOSP 2023): a small FIFO sorts out what is used once, a main FIFO keeps the rest.

A newcomer enters the small queue (a tenth of the room), or main if its key is still in the ghost list of what small
gave up. A use only counts, to at most 3. When room is wanted, small gives if it has reached its size, else main. What
leaves small with two uses or more moves to main and starts at none (if main is then too large, it gives up a block);
the first with fewer goes, and is remembered. What comes to the front of main with uses left goes to its back with one
less; the first with none goes.

Held blocks step aside when they come to a front, still count in their queue, and step back to that front when they are
released. A path's tail stands before its head, but a head that came earlier may go first. Every hook is O(1) a block
amortised: each round through a queue uses up a use. One step may give up two blocks where one is wanted: the second is
the next victim, unless it is used before.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.base import PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey
from kvcontrol.kv_policy.ghost import GhostList

_MAX_USES = 3


class _Entry:
    __slots__ = ("key", "main", "uses")

    def __init__(self, key: ContentKey | None, main: bool) -> None:  # noqa: FBT001 - made in one place
        self.key = key
        self.main = main
        self.uses = 0


class S3FifoPolicy(PathPolicy[_Entry]):
    """See the module's text. ``small`` is the small queue's share; ``threshold`` uses bring a block into main."""

    name = "s3fifo"
    reason = "s3fifo: came to the front of its queue without having been used enough"
    tails_first = False

    def __init__(self, capacity_blocks: int, *, small: float = 0.1, threshold: int = 2) -> None:
        super().__init__()
        self._threshold = threshold
        self._small_room = max(1, int(small * capacity_blocks))
        self._main_room = capacity_blocks - self._small_room
        self._small: OrderedDict[BlockId, None] = OrderedDict()
        self._main: OrderedDict[BlockId, None] = OrderedDict()
        self._aside_small: set[BlockId] = set()
        self._aside_main: set[BlockId] = set()
        self._ghosts: GhostList[bool] = GhostList(max(1, int((1 - small) * capacity_blocks)))
        self._next: OrderedDict[BlockId, None] = OrderedDict()

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        main = key is not None and self._ghosts.take(key) is not None
        self._entries[block] = _Entry(key, main)
        (self._main if main else self._small)[block] = None

    def _touch(self, block: BlockId) -> None:
        entry = self._entries[block]
        if entry.uses < _MAX_USES:
            entry.uses += 1
        if block in self._next:
            del self._next[block]
            self._main[block] = None

    def _park(self, block: BlockId) -> None:
        if block in self._next:
            del self._next[block]
            self._main[block] = None

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in path:  # a tail comes to stand before its head
            main = self._entries[block].main
            aside, queue = (self._aside_main, self._main) if main else (self._aside_small, self._small)
            if block in aside:
                aside.remove(block)
                queue[block] = None
                queue.move_to_end(block, last=False)

    def _drop(self, block: BlockId) -> None:
        if self._entries[block].main:
            self._aside_main.discard(block)
            self._main.pop(block, None)
            self._next.pop(block, None)
        else:
            self._aside_small.discard(block)
            self._small.pop(block, None)

    def _choose(self, incoming: ContentKey | None) -> BlockId | None:  # noqa: ARG002 - it learns at the insertion
        if self._next:
            block, _ = self._next.popitem(last=False)
        else:
            small_is_large = len(self._small) + len(self._aside_small) >= self._small_room
            order = (self._from_small, self._from_main) if small_is_large else (self._from_main, self._from_small)
            found = order[0]()
            if found is None:
                found = order[1]()
            if found is None and self._next:
                found, _ = self._next.popitem(last=False)
            if found is None:
                return None
            block = found
            if self._next:  # main's victim went before small's
                self._next[block] = None
                block, _ = self._next.popitem(last=False)
        del self._entries[block]
        return block

    def _from_small(self) -> BlockId | None:
        small, entries, holds = self._small, self._entries, self._holds
        while small:
            block, _ = small.popitem(last=False)
            entry = entries[block]
            if block in holds:
                self._aside_small.add(block)
            elif entry.uses >= self._threshold:
                entry.uses = 0
                entry.main = True
                self._main[block] = None
                if len(self._main) + len(self._aside_main) > self._main_room:
                    victim = self._from_main()
                    if victim is not None:
                        self._next[victim] = None
            else:
                if entry.key is not None:
                    self._ghosts.put(entry.key, True)  # noqa: FBT003 - a value that nobody reads
                return block
        return None

    def _from_main(self) -> BlockId | None:
        main, entries, holds = self._main, self._entries, self._holds
        while main:
            block, _ = main.popitem(last=False)
            entry = entries[block]
            if block in holds:
                self._aside_main.add(block)
            elif entry.uses:
                entry.uses -= 1
                main[block] = None
            else:
                return block
        return None


__all__ = ["S3FifoPolicy"]
