"""LRU: the block whose last use lies furthest back goes first.

All blocks that nobody holds stand in one line, oldest first. Inserting, using or releasing a path takes its blocks out
of the line and puts them back at the young end, tail first: so a head is always younger than the tails that were told
with it, and the oldest block of all never has a younger tail that would become useless with it. The victim is the
first in line. Held blocks stand outside. Everything is a dictionary operation: O(1) a block, no scan.

Rejected: timestamps and a heap (O(log n), ties within one clock tick decide by accident), LMDeploy's own scan over all
leaves.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.eviction import ContentKey, EvictionDecision, PolicyContext

_REASON = "lru: used longest ago"


class LruPolicy:
    """Least recently used, tails before heads (see the module's text)."""

    name = "lru"
    tails_first = True
    follows_prompts = False
    counts_uses = False

    def __init__(self) -> None:
        self._line: OrderedDict[BlockId, None] = OrderedDict()
        self._holds: dict[BlockId, int] = {}

    def __len__(self) -> int:
        return len(self._line) + len(self._holds)

    def requested(self, prompt: Sequence[ContentKey], *, block_tokens: int, prompt_tokens: int) -> None:
        """See ``EvictionPolicy``; LRU follows blocks alone."""

    def insert(self, path: Sequence[BlockId], keys: Sequence[ContentKey] = ()) -> None:
        """See ``EvictionPolicy``; LRU remembers nothing by ``keys``."""
        line, holds = self._line, self._holds
        if keys and len(keys) != len(path):
            raise ValueError(f"{len(path)} blocks are inserted with {len(keys)} keys")
        blocks = set(path)
        if not (line.keys().isdisjoint(blocks) and holds.keys().isdisjoint(blocks)):
            block = next(block for block in path if block in line or block in holds)
            raise ValueError(f"block {block} is resident already")
        _refuse_twice(path, blocks)
        for block in reversed(path):
            line[block] = None

    def access(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        line, holds = self._line, self._holds
        for block in reversed(path):
            if block not in holds:  # a held one becomes the youngest when it is released
                line.move_to_end(block)

    def hold(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        blocks = self._check(path)
        line, holds = self._line, self._holds
        if holds.keys().isdisjoint(blocks):
            for block in path:
                del line[block]
            holds.update(dict.fromkeys(path, 1))
            return
        for block in path:
            if block in holds:
                holds[block] += 1
            else:
                del line[block]
                holds[block] = 1

    def release(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        blocks = self._check(path)
        line, holds = self._line, self._holds
        if not holds.keys() >= blocks:
            block = next(block for block in path if block not in holds)
            raise ValueError(f"block {block} is not held")
        for block in reversed(path):
            if holds[block] > 1:
                holds[block] -= 1
            else:
                del holds[block]
                line[block] = None

    def remove(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        for block in path:
            if self._holds.pop(block, None) is None:
                del self._line[block]

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """See ``EvictionPolicy``."""
        line = self._line
        victims = tuple(islice(line, max(0, context.wanted_blocks)))
        for block in victims:  # faster than as many popitem(last=False)
            del line[block]
        return EvictionDecision(victims=victims, reason=_REASON)

    def _check(self, path: Sequence[BlockId]) -> set[BlockId]:
        line, holds = self._line, self._holds
        blocks = set(path)
        if not (line.keys() >= blocks or holds.keys() >= blocks):
            for block in path:
                if block not in line and block not in holds:
                    raise KeyError(f"block {block} is not resident")
        _refuse_twice(path, blocks)
        return blocks


def _refuse_twice(path: Sequence[BlockId], blocks: set[BlockId]) -> None:
    if len(blocks) != len(path):
        raise ValueError(f"a path names a block once: {list(path)}")


__all__ = ["LruPolicy"]
