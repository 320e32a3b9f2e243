"""What was routed where a moment ago and is not confirmed by KV events yet.

A burst of requests with one long prefix arrives before the first of them is cached anywhere. Without this memory they
would scatter over all instances and each would compute the prefix.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.core.ids import BlockHash, InstanceId


class RecentRoutes:
    """The last place of each block, for ``lifetime_s``; at most ``capacity_blocks``, the oldest go first."""

    def __init__(self, *, lifetime_s: float, capacity_blocks: int = 1 << 16) -> None:
        self._lifetime_s = lifetime_s
        self._capacity_blocks = capacity_blocks
        self._places: OrderedDict[BlockHash, tuple[InstanceId, float]] = OrderedDict()

    def remember(self, hashes: Sequence[BlockHash], instance: InstanceId, now_s: float) -> None:
        """Note that a prompt with these blocks goes to ``instance`` now. O(blocks); leave out those it holds
        already.
        """
        if not self._lifetime_s:
            return
        places = self._places
        until_s = now_s + self._lifetime_s
        for block in hashes[: self._capacity_blocks]:
            places[block] = (instance, until_s)
            places.move_to_end(block)
        while len(places) > self._capacity_blocks:
            places.popitem(last=False)

    def expected(self, hashes: Sequence[BlockHash], instance: InstanceId, now_s: float, *, start: int = 0) -> int:
        """Return how many blocks from the one at ``start`` on were sent to ``instance`` lately. O(answer)."""
        places = self._places
        for count in range(start, len(hashes)):
            place = places.get(hashes[count])
            if place is None or place[0] != instance or place[1] <= now_s:
                return count - start
        return max(0, len(hashes) - start)

    def place(self, block: BlockHash, now_s: float) -> InstanceId | None:
        """Return where a block was sent lately."""
        place = self._places.get(block)
        return None if place is None or place[1] <= now_s else place[0]

    def forget(self, instance: InstanceId) -> None:
        """Drop all that was sent to an instance, because it is gone or its cache was cleared. O(size)."""
        for block in [block for block, (place, _) in self._places.items() if place == instance]:
            del self._places[block]


__all__ = ["RecentRoutes"]
