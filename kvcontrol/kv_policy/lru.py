"""LRU: evicts the least recently used block.

All blocks that nobody holds stand in one line, oldest first. Inserting, using or releasing a path takes its blocks out
of the line and puts them at the young end, tail first: so a head is always younger than the tails that were told with
it, and the oldest block of all never has a younger tail that would become useless with it. The victim is the first in
line. Held blocks stand outside.

A dictionary has those in the line in their order, but has no quick way to its first: it looks at all who left before.
So there is a list beside it, read from its front. Whoever leaves the line from its middle leaves a place in the list
that is nobody's; how many of those a block has is counted, and as its own place is the last one, the first so many are
passed over when they come to the front. Victims are then a slice of dense memory and one deletion each. When there are
more such places and passed ones than blocks, the list is copied anew: every hook is O(1) a block, amortised.

Rejected: an ``OrderedDict`` (three look-ups in scattered memory for a victim; it makes room by walking all of them),
timestamps and a heap (O(log n), ties within one clock tick decide by accident), LMDeploy's own scan over all leaves.
"""

from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import check_keys, check_prompt, check_whole
from kvcontrol.kv_policy.eviction import ContentKey, EvictionDecision, PolicyContext

_REASON = "lru: used longest ago"
_SLACK = 64


class LruPolicy:
    """Least recently used, tails before heads (see the module's text)."""

    name = "lru"
    tails_first = True
    follows_prompts = False
    counts_uses = False

    def __init__(self) -> None:
        self._places: list[BlockId] = []
        """The list beside the line."""
        self._first = 0
        """Where the line begins in it; what is before has gone."""
        self._line: dict[BlockId, None] = {}
        """Those in the line, in its order."""
        self._stale: dict[BlockId, int] = {}
        """Of blocks with places that are nobody's, how many; absent is none."""
        self._holds: dict[BlockId, int] = {}

    def __len__(self) -> int:
        return len(self._line) + len(self._holds)

    def requested(self, prompt: Sequence[ContentKey], *, block_tokens: int, prompt_tokens: int) -> None:
        """See ``EvictionPolicy``; LRU follows blocks alone."""
        check_prompt(prompt, block_tokens, prompt_tokens)

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
        if keys:
            check_keys(keys)
        for block in reversed(path):
            line[block] = None
        self._places += reversed(path)
        self._tidy()

    def access(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        places, line, stale = self._places, self._line, self._stale
        for block in reversed(path):
            if block in line:  # a held one becomes the youngest when it is released
                del line[block]
                line[block] = None
                stale[block] = stale.get(block, 0) + 1
                places.append(block)
        self._tidy()

    def hold(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        line, holds, stale = self._line, self._holds, self._stale
        for block in path:
            if block in holds:
                holds[block] += 1
            else:
                del line[block]
                holds[block] = 1
                stale[block] = stale.get(block, 0) + 1

    def release(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        blocks = self._check(path)
        places, line, holds = self._places, self._line, self._holds
        if not holds.keys() >= blocks:
            block = next(block for block in path if block not in holds)
            raise ValueError(f"block {block} is not held")
        for block in reversed(path):
            if holds[block] > 1:
                holds[block] -= 1
            else:
                del holds[block]
                line[block] = None
                places.append(block)
        self._tidy()

    def remove(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        line, holds, stale = self._line, self._holds, self._stale
        for block in path:
            if holds.pop(block, None) is None:
                del line[block]
                stale[block] = stale.get(block, 0) + 1

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """See ``EvictionPolicy``."""
        wanted = context.wanted_blocks
        if type(wanted) is not int or wanted < 0:
            check_whole("wanted_blocks", wanted)
        first = self._first
        victims = self._places[first : first + wanted]
        if self._stale and not self._stale.keys().isdisjoint(victims):
            victims = self._walk(wanted)
        else:
            self._first = first + len(victims)
        line = self._line
        for block in victims:
            del line[block]
        return EvictionDecision(tuple(victims), _REASON)

    def _walk(self, wanted: int) -> list[BlockId]:
        """Take blocks off the front of the line, past empty places."""
        places, stale, place = self._places, self._stale, self._first
        end = len(places)
        victims: list[BlockId] = []
        while place < end and len(victims) < wanted:
            block = places[place]
            place += 1
            left = stale.get(block)
            if left is None:
                victims.append(block)
            elif left == 1:
                del stale[block]
            else:
                stale[block] = left - 1
        self._first = place
        return victims

    def _tidy(self) -> None:
        """Keep a valid block at the front, so that choosing a victim needs no search; keep the list short."""
        places, stale = self._places, self._stale
        while stale and self._first < len(places) and places[self._first] in stale:
            block = places[self._first]
            self._first += 1
            if stale[block] == 1:
                del stale[block]
            else:
                stale[block] -= 1
        if len(places) > 2 * len(self._line) + _SLACK:
            self._places = list(self._line)
            self._first = 0
            stale.clear()

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
