"""Recent routing decisions that KV events have not confirmed yet.

A burst of requests with one long prefix arrives before the first of them is cached anywhere. Without this memory they
would scatter over all instances and each would compute the prefix.

Blocks are kept in four generations. New ones go into the first; when that is full it becomes the second, and what was
the fourth is taken apart, some with each call. The obvious choice, one table in the order of use, costs seven times as
much once it is full: each block is then a link to move and another one to take out, all over the memory.
"""

from collections import deque
from collections.abc import Sequence
from itertools import repeat, starmap
from typing import Final

from kvcontrol.core.ids import BlockHash, InstanceId

_Place = tuple[InstanceId, float]
_GENERATIONS: Final = 4
_TAKEN_APART: Final = 4
"""So many blocks more of a generation that is over go with each prompt than come with it."""

_consume = deque[object](maxlen=0).extend


class RecentRoutes:
    """The last place of each block, for ``lifetime_s``; at most ``capacity_blocks``, and the oldest quarter goes first.
    Of a prompt of more than a quarter the beginning counts.
    """

    def __init__(self, *, lifetime_s: float, capacity_blocks: int = 1 << 16) -> None:
        self._lifetime_s = lifetime_s
        self._most = max(1, capacity_blocks // _GENERATIONS)
        self._generations: list[dict[BlockHash, _Place]] = [{} for _ in range(_GENERATIONS)]
        self._over: dict[BlockHash, _Place] = {}

    def __len__(self) -> int:
        """How many blocks are remembered, those twice that are in two generations."""
        return sum(map(len, self._generations))

    def remember(self, hashes: Sequence[BlockHash], instance: InstanceId, now_s: float) -> None:
        """Note that a prompt with these blocks goes to ``instance`` now. O(blocks); leave out those it holds
        already.
        """
        if not self._lifetime_s:
            return
        young = self._generations[0]
        if len(young) + len(hashes) > self._most and young:
            self._over = self._generations.pop()
            young = {}
            self._generations.insert(0, young)
        place = (instance, now_s + self._lifetime_s)
        young.update(dict.fromkeys(hashes if len(hashes) <= self._most else hashes[: self._most], place))
        over = self._over
        if over:
            _consume(starmap(over.popitem, repeat((), min(len(over), len(hashes) + _TAKEN_APART))))

    def expected(self, hashes: Sequence[BlockHash], instance: InstanceId, now_s: float, *, start: int = 0) -> int:
        """Return how many blocks from the one at ``start`` on were sent to ``instance`` lately. O(answer)."""
        young, second, third, old = self._generations
        for count in range(start, len(hashes)):
            block = hashes[count]
            place = young.get(block) or second.get(block) or third.get(block) or old.get(block)
            if place is None or place[0] != instance or place[1] <= now_s:
                return count - start
        return max(0, len(hashes) - start)

    def place(self, block: BlockHash, now_s: float) -> InstanceId | None:
        """Return where a block was sent lately."""
        young, second, third, old = self._generations
        place = young.get(block) or second.get(block) or third.get(block) or old.get(block)
        return place[0] if place is not None and place[1] > now_s else None

    def deepest(self, hashes: Sequence[BlockHash], now_s: float) -> tuple[InstanceId, int] | None:
        """Return where the longest beginning of a prompt was sent, and its blocks. O(log blocks): whoever sends a block
        sends all before it, and these are remembered for as long.
        """
        known, unknown = 0, len(hashes)
        while known < unknown:
            middle = (known + unknown) // 2
            if self.place(hashes[middle], now_s) is None:
                unknown = middle
            else:
                known = middle + 1
        home = self.place(hashes[known - 1], now_s) if known else None
        return None if home is None else (home, known)

    def forget(self, instance: InstanceId) -> None:
        """Drop all that was sent to an instance, because it is gone or its cache was cleared. O(size)."""
        for generation in self._generations:
            for block in [block for block, (place, _) in generation.items() if place == instance]:
                generation[block] = _NOWHERE


_NOWHERE: Final[_Place] = (InstanceId(""), float("-inf"))
"""Forgotten, and older places of the block with it."""
