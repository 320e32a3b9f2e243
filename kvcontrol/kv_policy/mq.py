"""MQ (Zhou, Philbin and Li, USENIX 2001): queues for 1, 2-3, 4-7, ... uses; unused blocks descend.

There are eight LRU lines. A block with f uses stands in line log2(f), at most the last, and may stay ``lifetime``
accesses there without being used. After each access the first of every line but the lowest whose time is over moves to
the young end of the line below, with new time. The victim is the first of the lowest line that has anybody in it. A
ghost list remembers the uses of what left, so that a block which comes back goes on counting.

That makes it slow to forget what is used often, but not unable to, which LFU is. Held blocks stand outside and return
to the young end of their line with new time. A clock counts accesses and insertions. Every hook is O(1) a block: there
are eight lines, whatever they hold.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import MOST_CAPACITIES, check_capacity, check_number
from kvcontrol.kv_policy.base import OLDEST, PathPolicy
from kvcontrol.kv_policy.eviction import ContentKey
from kvcontrol.kv_policy.ghost import GhostList

_LINES = 8


class _Entry:
    __slots__ = ("expires", "key", "line", "uses")

    def __init__(self, key: ContentKey | None, uses: int) -> None:
        self.key = key
        self.uses = uses
        self.line = _line_of(uses)
        self.expires = 0


class MqPolicy(PathPolicy[_Entry]):
    """See the module's text. ``lifetime`` and ``ghosts`` are multiples of ``capacity_blocks``."""

    name = "mq"
    reason = "mq: least often used of late"
    tails_first = True

    def __init__(self, capacity_blocks: int, *, lifetime: float = 1.0, ghosts: float = 4.0) -> None:
        check_capacity(capacity_blocks)
        check_number("lifetime", lifetime, above=0, most=MOST_CAPACITIES)
        check_number("ghosts", ghosts, most=MOST_CAPACITIES)
        super().__init__()
        self._lifetime = max(1, int(lifetime * capacity_blocks))
        self._lines: tuple[OrderedDict[BlockId, None], ...] = tuple(OrderedDict() for _ in range(_LINES))
        self._ghosts: GhostList[int] = GhostList(int(ghosts * capacity_blocks))
        self._now = 0

    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        uses = (key is not None and self._ghosts.take(key)) or 0
        entry = self._entries[block] = _Entry(key, uses + 1)
        self._now += 1
        entry.expires = self._now + self._lifetime
        self._lines[entry.line][block] = None
        self._age()

    def _touch(self, block: BlockId) -> None:
        entry = self._entries[block]
        entry.uses += 1
        self._now += 1
        line = _line_of(entry.uses)
        if block not in self._holds:
            del self._lines[entry.line][block]
            self._lines[line][block] = None
            entry.expires = self._now + self._lifetime
        entry.line = line
        self._age()

    def _park(self, block: BlockId) -> None:
        del self._lines[self._entries[block].line][block]

    def _unpark(self, path: Sequence[BlockId]) -> None:
        expires = self._now + self._lifetime
        for block in reversed(path):
            entry = self._entries[block]
            entry.expires = expires
            self._lines[entry.line][block] = None

    def _drop(self, block: BlockId) -> None:
        if block not in self._holds:
            self._park(block)
        self._part([self._entries[block]])

    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:  # noqa: ARG002
        victims: list[BlockId] = []
        entries, part = self._entries, self._parted.append
        for line in self._lines:
            while line and len(victims) < wanted:
                block, _ = line.popitem(OLDEST)
                victims.append(block)
                part(entries.pop(block))
        return victims

    def _part(self, entries: list[_Entry]) -> None:
        for entry in entries:
            if entry.key is not None:
                self._ghosts.put(entry.key, entry.uses)

    def _age(self) -> None:
        now, entries, lines = self._now, self._entries, self._lines
        for above in range(_LINES - 1, 0, -1):
            line = lines[above]
            if line:
                block = next(iter(line))
                entry = entries[block]
                if entry.expires < now:
                    del line[block]
                    lines[above - 1][block] = None
                    entry.line = above - 1
                    entry.expires = now + self._lifetime


def _line_of(uses: int) -> int:
    return min(_LINES - 1, uses.bit_length() - 1)
