"""Brings blocks up from NVMe before a request comes for them, because prompts like theirs came back after such a time.

Told of every prompt that is looked up below HBM, it keeps their lineage; every ``every_s`` it has at most
``budget_blocks`` brought into DDR that are below it alone and will probably be used soon. What became of them is
counted: used once they are looked up again, wasted once they are below alone again or many others were brought up.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.kv_policy import HotspotLineage
from kvcontrol.kv_policy.eviction import ContentKey
from kvcontrol.kv_runtime import HierarchyManager

_MOST_WATCHED = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchCounts:
    """Blocks since the start; what was brought up and is neither used nor wasted is still waiting."""

    prefetched_blocks: int
    used_blocks: int
    wasted_blocks: int


class Prefetcher:
    """See the module's text. Belongs to the hierarchy's thread; ``counts`` may be read from any."""

    def __init__(
        self,
        hierarchy: HierarchyManager,
        *,
        least_probability: float,
        budget_blocks: int = 256,
        every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (0 < least_probability <= 1 and budget_blocks > 0 and every_s > 0):
            raise ValueError(
                f"least_probability {least_probability}, budget_blocks {budget_blocks}, every_s {every_s}; all must be "
                "> 0, a probability at most 1"
            )
        self.lineage = HotspotLineage()
        self._hierarchy = hierarchy
        self._least = least_probability
        self._budget = budget_blocks
        self._every_s = every_s
        self._clock = clock
        self._next_s = 0.0
        self._waiting: OrderedDict[ContentKey, None] = OrderedDict()
        """Brought up and not used yet, the oldest first."""
        self._prefetched = self._used = self._wasted = 0

    @property
    def counts(self) -> PrefetchCounts:
        """What became of the blocks that were brought up."""
        return PrefetchCounts(prefetched_blocks=self._prefetched, used_blocks=self._used, wasted_blocks=self._wasted)

    def observe(self, keys: Sequence[BlockHash]) -> None:
        """Follow a prompt that is looked up. A fraction of 1 us a block."""
        if self._waiting:
            for key in keys:
                if key in self._waiting:
                    del self._waiting[key]
                    if self._below(key) is None:
                        self._used += 1
                    else:
                        self._wasted += 1
        self.lineage.observe(keys, self._clock())

    def work(self) -> None:
        """Start what is due, if it is time; never waits."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        plan = self.lineage.plan(
            now_s,
            budget_blocks=self._budget,
            least_probability=self._least,
            wanted=lambda key: self._below(key) is not None,
        )
        found = [(key, block) for key in plan.keys if (block := self._below(key)) is not None]
        if not found:
            return
        self._hierarchy.prefetch([block for _, block in found])
        self._prefetched += len(found)
        for key, _ in found:
            if key in self._waiting:
                self._wasted += 1  # it went down again before anybody came
            self._waiting[key] = None
            self._waiting.move_to_end(key)
        while len(self._waiting) > _MOST_WATCHED:
            self._waiting.popitem(last=False)
            self._wasted += 1

    def _below(self, key: ContentKey) -> BlockId | None:
        """Return a key's block if NVMe alone has it."""
        block = self._hierarchy.find(BlockHash(key)) if isinstance(key, bytes) else None
        return block if block is not None and self._hierarchy.locate(block) == (CacheTier.NVME,) else None
