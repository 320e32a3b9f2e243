"""What prefetching is worth on a trace: how much of what it brought up was used, and of what was needed was up.

A fast tier of ``capacity_blocks`` with LRU over a slow one that holds all that was ever computed. A block that was
computed before and isn't in the fast tier when its request comes is a demand load. *Speculative*: every ``every_s`` the
lineage's plan is brought up. *Announced*: each request's blocks are brought up when so many others are before it in the
queue. A prefetched block that is evicted, or is there at the end, before it was used, was wasted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.eviction import ContentKey, PolicyContext
from kvcontrol.kv_policy.hotspot import HotspotLineage
from kvcontrol.kv_policy.lru import LruPolicy
from lab.traces import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchScore:
    """``precision``: of the prefetched, used; ``recall``: of what a demand load would have had to bring, prefetched."""

    prefetched_blocks: int
    used_blocks: int
    demand_blocks: int
    wasted_blocks: int

    @property
    def precision(self) -> float:
        """Share of prefetched blocks that were used."""
        return self.used_blocks / self.prefetched_blocks if self.prefetched_blocks else 0.0

    @property
    def recall(self) -> float:
        """Share of needed blocks that had been prefetched."""
        needed = self.used_blocks + self.demand_blocks
        return self.used_blocks / needed if needed else 0.0


class _FastTier:
    def __init__(self, capacity_blocks: int) -> None:
        self.resident: set[int] = set()
        self.unused: set[int] = set()
        """Prefetched, and not used since."""
        self.seen: set[int] = set()
        self.prefetched = self.used = self.demanded = self.wasted = 0
        self._capacity = capacity_blocks
        self._policy = LruPolicy()

    def serve(self, ids: Sequence[int]) -> None:
        for content in reversed(ids):
            block = BlockId(content)
            if content in self.resident:
                self._policy.access((block,))
                if content in self.unused:
                    self.unused.remove(content)
                    self.used += 1
            else:
                self.demanded += content in self.seen
                self._bring(block)
        self.seen.update(ids)

    def prefetch(self, ids: Iterable[int]) -> None:
        for content in reversed([each for each in ids if each in self.seen and each not in self.resident]):
            self._bring(BlockId(content))
            self.unused.add(content)
            self.prefetched += 1

    def score(self) -> PrefetchScore:
        return PrefetchScore(
            prefetched_blocks=self.prefetched,
            used_blocks=self.used,
            demand_blocks=self.demanded,
            wasted_blocks=self.wasted + len(self.unused),
        )

    def _bring(self, block: BlockId) -> None:
        if len(self.resident) >= self._capacity:
            context = PolicyContext(
                tier=CacheTier.DDR,
                wanted_blocks=1,
                used_blocks=len(self.resident),
                capacity_blocks=self._capacity,
            )
            for victim in self._policy.select_victims(context).victims:
                self.resident.remove(victim)
                if victim in self.unused:
                    self.unused.remove(victim)
                    self.wasted += 1
        self._policy.insert((block,))
        self.resident.add(block)


def speculative(
    requests: Sequence[Request],
    *,
    capacity_blocks: int,
    least_probability: float,
    every_s: float = 1.0,
    horizon_s: float = 15.0,
) -> PrefetchScore:
    """Prefetch what the lineage expects, at most a tenth of the fast tier at a time."""
    tier = _FastTier(capacity_blocks)
    lineage = HotspotLineage(horizon_s=horizon_s, max_blocks=1 << 20)
    next_s = 0.0

    def wanted(key: ContentKey) -> bool:
        return key not in tier.resident

    for request in requests:
        if request.at_s >= next_s:
            plan = lineage.plan(
                request.at_s,
                budget_blocks=max(1, capacity_blocks // 10),
                least_probability=least_probability,
                wanted=wanted,
            )
            tier.prefetch([key for key in plan.keys if isinstance(key, int)])
            next_s = request.at_s + every_s
        tier.serve(request.block_ids)
        lineage.observe(request.block_ids, request.at_s)
    return tier.score()


def announced(requests: Sequence[Request], *, capacity_blocks: int, queue: int = 4) -> PrefetchScore:
    """Prefetch for each request when it enters a queue that is ``queue`` long."""
    tier = _FastTier(capacity_blocks)
    for place, request in enumerate(requests):
        if place + queue < len(requests):
            tier.prefetch(requests[place + queue].block_ids)
        tier.serve(request.block_ids)
    return tier.score()
