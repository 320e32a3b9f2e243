"""The naive twin of ``LruPolicy``: a stamp for every block and a full scan for every victim. For tests."""

from collections.abc import Sequence
from itertools import count

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.allowed import check_keys, check_prompt, check_whole
from kvcontrol.kv_policy.eviction import ContentKey, EvictionDecision, PolicyContext


class NaiveLruPolicy:
    """Least recently used, by counting; O(n) a victim."""

    name = "naive lru"
    tails_first = True
    follows_prompts = False
    counts_uses = False

    def __init__(self) -> None:
        self._ticks = count()
        self._used: dict[BlockId, int] = {}
        self._held: list[BlockId] = []

    def __len__(self) -> int:
        return len(self._used)

    def requested(self, prompt: Sequence[ContentKey], *, block_tokens: int, prompt_tokens: int) -> None:
        """See ``EvictionPolicy``; LRU follows blocks alone."""
        check_prompt(prompt, block_tokens, prompt_tokens)

    def insert(self, path: Sequence[BlockId], keys: Sequence[ContentKey] = ()) -> None:
        """See ``EvictionPolicy``; ``keys`` are counted, and of no further use."""
        if keys and len(keys) != len(path):
            raise ValueError("as many keys as blocks")
        if any(block in self._used for block in path) or len(set(path)) < len(path):
            raise ValueError("resident already, or named twice")
        check_keys(keys)
        self._stamp(path)

    def access(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        self._stamp(path)

    def hold(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        self._held.extend(path)

    def release(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        if any(block not in self._held for block in path):
            raise ValueError("not held")
        for block in path:
            self._held.remove(block)
        self._stamp(path)

    def remove(self, path: Sequence[BlockId]) -> None:
        """See ``EvictionPolicy``."""
        self._check(path)
        for block in path:
            del self._used[block]
        self._held = [block for block in self._held if block not in path]

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """See ``EvictionPolicy``."""
        check_whole("wanted_blocks", context.wanted_blocks)
        free = sorted((block for block in self._used if block not in self._held), key=self._used.__getitem__)
        victims = tuple(free[: context.wanted_blocks])
        for block in victims:
            del self._used[block]
        return EvictionDecision(victims=victims, reason=f"{self.name}: used longest ago")

    def _stamp(self, path: Sequence[BlockId]) -> None:
        for block in reversed(path):
            self._used[block] = next(self._ticks)

    def _check(self, path: Sequence[BlockId]) -> None:
        if any(block not in self._used for block in path):
            raise KeyError("not resident")
        if len(set(path)) < len(path):
            raise ValueError("named twice")
