"""Replays a trace through one policy: which share of the prompts would have been in a cache of so many blocks?

For each request, in order: first its resident blocks are counted, before anything is touched; then every block
is accessed, the deepest first, so that tails go before heads. A block that isn't there comes in, and where the cache is
full one block goes before it. Blocks are told one by one, so that the policy decides at each, as its paper has it.
"""

from collections.abc import Iterable

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.benchmarks.hits import HitCounter, HitRates
from kvcontrol.kv_policy.eviction import EvictionPolicy, PolicyContext
from kvcontrol.traces import Request


def replay(requests: Iterable[Request], policy: EvictionPolicy, *, capacity_blocks: int) -> HitRates:
    """Run all requests through an empty policy; a block's id is its key. O(1) a block, microseconds each."""
    resident: set[int] = set()
    counter = HitCounter()
    access, insert, select = policy.access, policy.insert, policy.select_victims
    for request in requests:
        counter.add(request, resident)
        for block in reversed(request.block_ids):
            path = (BlockId(block),)
            if block in resident:
                access(path)
                continue
            if len(resident) >= capacity_blocks:
                context = PolicyContext(
                    tier=CacheTier.HBM,
                    wanted_blocks=1,
                    used_blocks=len(resident),
                    capacity_blocks=capacity_blocks,
                    incoming=path,
                )
                resident.difference_update(select(context).victims)
            insert(path, path)
            resident.add(block)
    return counter.rates()


__all__ = ["replay"]
