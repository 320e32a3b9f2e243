"""What all policies but LRU do alike: refuse wrong calls before anything changes, count holds, walk paths tail first.

A policy derives from ``PathPolicy`` and says what becomes of one block at a time, and chooses many in one loop.
``entries`` is the one dictionary of resident blocks; what a policy keeps of a block is its value there. What it has to
remember of those it chose it writes down when it is told or asked of anything next, before that: a choice is what
somebody waits for. (LRU keeps no entries at all and its calls are on the engine's own path, so it stands alone.)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import check_keys, check_prompt, check_whole
from kvcontrol.kv_policy.eviction import ContentKey, EvictionDecision, PolicyContext

Entry = TypeVar("Entry")

OLDEST: Final = False
"""``OrderedDict.popitem`` for the first: by place, as by name (``last=``) it takes twice as long."""


class PathPolicy(ABC, Generic[Entry]):
    """An ``EvictionPolicy`` by way of smaller steps; a subclass sets ``name`` and ``reason``."""

    name: str
    reason: str
    tails_first: bool
    follows_prompts: bool = False
    counts_uses: bool = True

    def __init__(self) -> None:
        self._entries: dict[BlockId, Entry] = {}
        self._holds: dict[BlockId, int] = {}
        self._parted: list[Entry] = []
        """Of those that were chosen, in their order, what ``_part`` has to be told."""

    def __len__(self) -> int:
        return len(self._entries)

    def requested(self, prompt: Sequence[ContentKey], *, block_tokens: int, prompt_tokens: int) -> None:
        """See ``EvictionPolicy``; most follow blocks alone."""
        check_prompt(prompt, block_tokens, prompt_tokens)

    def insert(self, path: Sequence[BlockId], keys: Sequence[ContentKey] = ()) -> None:
        """See ``EvictionPolicy``."""
        if self._parted:
            self._settle()
        entries, add = self._entries, self._add
        for block in path:
            if block in entries:
                raise ValueError(f"block {block} is resident already")
        _refuse_twice(path)
        if keys:
            if len(keys) != len(path):
                raise ValueError(f"{len(path)} blocks are inserted with {len(keys)} keys")
            check_keys(keys)
            for block, key in zip(reversed(path), reversed(keys), strict=True):
                add(block, key)
        else:
            for block in reversed(path):
                add(block, None)

    def access(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        touch = self._touch
        for block in reversed(path):
            touch(block)

    def hold(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        holds = self._holds
        for block in path:
            if block in holds:
                holds[block] += 1
            else:
                holds[block] = 1
                self._park(block)

    def release(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        holds = self._holds
        for block in path:
            if block not in holds:
                raise ValueError(f"block {block} is not held")
        free = [block for block in path if holds[block] == 1]
        for block in path:
            holds[block] -= 1
        for block in free:
            del holds[block]
        self._unpark(free)

    def remove(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        for block in reversed(path):
            self._drop(block)
            self._holds.pop(block, None)
            del self._entries[block]

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """See ``EvictionPolicy``."""
        wanted = context.wanted_blocks
        if type(wanted) is not int or wanted < 0:
            check_whole("wanted_blocks", wanted)
        if self._parted:
            self._settle()
        return EvictionDecision(tuple(self._choose(wanted, context.incoming)), self.reason)

    @abstractmethod
    def _add(self, block: BlockId, key: ContentKey | None) -> None:
        """Make an entry of a block that nobody holds; None is content that won't be known again."""

    @abstractmethod
    def _touch(self, block: BlockId) -> None:
        """Count a use of a block, held or not."""

    @abstractmethod
    def _park(self, block: BlockId) -> None:
        """Keep a block from being chosen: it is in ``_holds`` now."""

    @abstractmethod
    def _unpark(self, path: Sequence[BlockId]) -> None:
        """Let blocks be chosen again, heads before tails: they are in ``_holds`` no more."""

    @abstractmethod
    def _drop(self, block: BlockId) -> None:
        """Take a block, held or not, out of everything but ``_entries`` and ``_holds``."""

    @abstractmethod
    def _choose(self, wanted: int, incoming: Sequence[ContentKey]) -> list[BlockId]:
        """Take up to so many blocks out of everything, their entries too; fewer when the rest is held.

        The entries of those that are to be remembered go to ``_parted``. It is one loop, because each call costs as
        much as a step, and more where the processor's caches are cold.
        """

    def _part(self, entries: list[Entry]) -> None:
        """Remember those that were chosen, in this order. Nothing, where a policy fills no ``_parted``."""

    def _settle(self) -> None:
        parted, self._parted = self._parted, []
        self._part(parted)

    def _check(self, path: Sequence[BlockId]) -> None:
        if self._parted:
            self._settle()
        entries = self._entries
        for block in path:
            if block not in entries:
                raise KeyError(f"block {block} is not resident")
        _refuse_twice(path)


def _refuse_twice(path: Sequence[BlockId]) -> None:
    if len(path) > 1 and len(set(path)) != len(path):
        raise ValueError(f"a path names a block once: {list(path)}")
