"""Succession of a policy: the successor learns all blocks in parts, while the predecessor chooses victims.

What the successor has been told of are always the blocks used longest ago, in the order of their last uses: first those
that were there at the start, oldest first, then what has come or was used since. A block that is used after it was told
is taken back and told again in its turn; one that leaves is taken back for good. So at the end the successor knows
exactly the blocks that are there, in their order, whatever happened in between, and until then nothing has changed.

A part costs what its insertions cost; what is told twice are uses that came in between, so parts that are larger than
that come to an end.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from kvcontrol.core.ids import BlockId
from kvcontrol.core.integrity import must
from kvcontrol.kv_policy.eviction import ContentKey, EvictionPolicy

Link: TypeAlias = tuple[ContentKey, ContentKey | None]
"""What a block holds, and what comes before that; None for the first block of a prompt."""


class Succession:
    """See the module's text. ``links`` are the present blocks; their owner reports changes."""

    def __init__(self, policy: EvictionPolicy, links: Mapping[BlockId, Link]) -> None:
        if len(policy):
            raise ValueError(f"a policy begins empty, {policy.name} knows {len(policy)} blocks")
        self.policy = policy
        self._links = links
        self._first = iter(list(links))
        """Those that were there at the start; of the rest, ``_late``, the one used longest ago comes first."""
        self._late: OrderedDict[BlockId, None] = OrderedDict()
        self._reported: set[BlockId] = set()

    @property
    def missing(self) -> int:
        """Number of blocks that the successor has not received yet."""
        return len(self._links) - len(self._reported)

    def advance(self, blocks: int) -> None:
        """Report up to so many more blocks. Errors of the policy are raised; it must not be used then."""
        late, reported, links = self._late, self._reported, self._links
        path = list(islice((each for each in self._first if each in links and each not in late), blocks))
        while late and len(path) < blocks:
            path.append(late.popitem(last=False)[0])
        if path:
            path.reverse()  # within a path tails count as older
            self.policy.insert(path, [links[block][0] for block in path])
            reported.update(path)

    def used(self, path: Sequence[BlockId]) -> None:
        """Follow blocks that came or were used, tail first, in paths."""
        late, reported, take_back = self._late, self._reported, self.policy.remove
        for block in reversed(path):
            if block in reported:
                reported.remove(block)
                take_back((block,))
            late[block] = None
            late.move_to_end(block)

    def gone(self, block: BlockId) -> None:
        """Follow a block that left."""
        if block in self._reported:
            self._reported.remove(block)
            self.policy.remove((block,))
        else:
            self._late.pop(block, None)

    def end(self, held: Iterable[BlockId]) -> EvictionPolicy:
        """Report missing and held blocks, and return the policy, which may replace its predecessor."""
        self.advance(self.missing)
        if holds := list(held):
            self.policy.hold(holds)
        return self.policy

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when it knows other blocks than there are, or in another order. O(blocks)."""
        must(len(self.policy) == len(self._reported), "the successor has other blocks than those reported to it")
        must(self._reported <= self._links.keys(), "the successor knows blocks that have gone")
        order = list(self._links)
        must(
            set(order[: len(self._reported)]) == self._reported,
            "younger blocks were reported to the successor before older ones",
        )
        late = len(self._late)
        must(order[len(order) - late :] == list(self._late), "what came or was used since isn't in its order")
