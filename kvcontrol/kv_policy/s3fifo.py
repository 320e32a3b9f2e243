"""S3-FIFO (Yang and others, SOSP 2023): a small FIFO filters blocks that are used once, a main FIFO keeps the rest.

A newcomer enters the small queue (a tenth of the room), or main if its key is still in the ghost list of what small
gave up. A use only counts, to at most 3. When room is wanted, small gives if it has reached its size, else main. What
leaves small with two uses or more moves to main and starts at none; if main is then too large, main gives. The first
with fewer goes, and is remembered. What comes to the front of main with uses left goes to its back with one less; the
first with none goes.

Held blocks step aside when they come to a front, still count in their queue, and step back to that front when they are
released. A path's tail stands before its head, but a head that came earlier may go first. Every hook is O(1) a block
amortised: each step through a queue uses up a use. Where small goes on after main gave (the paper's text allows it),
one decision has two victims, or many in a row cost nothing and then one much; hits are the same to five digits.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import check_capacity, check_number, check_whole
from kvcontrol.kv_policy.base import OLDEST, PathPolicy
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
        check_capacity(capacity_blocks)
        check_number("small", small, above=0, most=1)
        check_whole("threshold", threshold, least=1)
        super().__init__()
        self._threshold = threshold
        self._small_blocks = max(1, int(small * capacity_blocks))
        self._main_blocks = capacity_blocks - self._small_blocks
        self._small: OrderedDict[BlockId, _Entry] = OrderedDict()
        self._main: OrderedDict[BlockId, _Entry] = OrderedDict()
        self._aside_small: set[BlockId] = set()
        self._aside_main: set[BlockId] = set()
        self._ghosts: GhostList[bool] = GhostList(max(1, int((1 - small) * capacity_blocks)))

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        main = key is not None and self._ghosts.take(key) is not None
        entry = self._entries[block] = _Entry(key, main)
        (self._main if main else self._small)[block] = entry

    def _touch(self, block: BlockId) -> None:
        entry = self._entries[block]
        if entry.uses < _MAX_USES:
            entry.uses += 1

    def _park(self, block: BlockId) -> None:
        pass  # it steps aside when it comes to a front

    def _unpark(self, path: Sequence[BlockId]) -> None:
        for block in path:  # a tail comes to stand before its head
            entry = self._entries[block]
            aside, queue = (self._aside_main, self._main) if entry.main else (self._aside_small, self._small)
            if block in aside:
                aside.remove(block)
                queue[block] = entry
                queue.move_to_end(block, last=False)

    def _drop(self, block: BlockId) -> None:
        if self._entries[block].main:
            self._aside_main.discard(block)
            self._main.pop(block, None)
        else:
            self._aside_small.discard(block)
            self._small.pop(block, None)

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:  # noqa: ARG002
        victims: list[BlockId] = []
        small, aside, entries = self._small, self._aside_small, self._entries
        while (left := wanted - len(victims)) > 0:
            gone: list[BlockId] = []
            if len(small) + len(aside) < self._small_blocks:
                gone = self._from_main(left)
            # What small had may have gone to main.
            gone = gone or self._from_small(left) or self._from_main(left)
            if not gone:
                break
            victims += gone
        for block in victims:
            del entries[block]
        return victims

    def _part(self, entries: list[_Entry]) -> None:
        for entry in entries:
            if entry.key is not None:
                self._ghosts.put(entry.key, True)  # noqa: FBT003 - a value that nobody reads

    def _from_small(self, most: int) -> list[BlockId]:
        """Have small give one, and others as long as it stays as large as it should be; main, if that is too large."""
        small, main, holds, threshold = self._small, self._main, self._holds, self._threshold
        aside, part = self._aside_small, self._parted.append
        victims: list[BlockId] = []
        while small:
            block, entry = small.popitem(OLDEST)
            if block in holds:
                aside.add(block)
            elif entry.uses >= threshold:
                entry.uses = 0
                entry.main = True
                main[block] = entry
                if len(main) + len(self._aside_main) > self._main_blocks:
                    given = self._from_main(1)
                    if given:
                        return victims + given
            else:
                part(entry)
                victims.append(block)
                if len(victims) == most or len(small) + len(aside) < self._small_blocks:
                    break
        return victims

    def _from_main(self, most: int) -> list[BlockId]:
        main, holds = self._main, self._holds
        victims: list[BlockId] = []
        while main and len(victims) < most:
            used: list[BlockId] = []
            gone: list[BlockId] = []
            for block, entry in main.items():
                if entry.uses:
                    entry.uses -= 1
                    used.append(block)
                    continue
                gone.append(block)
                if block in holds:
                    self._aside_main.add(block)
                else:
                    victims.append(block)
                    if len(victims) == most:
                        break
            for block in gone:  # in loops of their own, as a dictionary that is walked through can't change
                del main[block]
            for block in used:
                main.move_to_end(block)
        return victims
