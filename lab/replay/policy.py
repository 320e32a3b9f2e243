"""Replays a trace through one policy: which share of the prompts would have been in a cache of so many blocks?

For each request, in order: first its resident blocks are counted, before anything is touched; then every block
is accessed, the deepest first, so that tails go before heads. A block that isn't there comes in, and where the cache is
full one block goes before it. Newcomers are told one by one, so that the policy decides at each, as its paper has it;
what is there in between is told in one call, which is the same to a policy and much faster.
"""

from collections.abc import Iterable

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy.eviction import EvictionPolicy, PolicyContext
from lab.replay.hits import HitCounter, HitRates
from lab.traces import Request


def replay(requests: Iterable[Request], policy: EvictionPolicy, *, capacity_blocks: int) -> HitRates:
    """Run all requests through an empty policy; a block's id is its key. O(1) a block, microseconds each."""
    resident: set[int] = set()
    counter = HitCounter()
    insert, select = policy.insert, policy.select_victims
    for request in requests:
        counter.add(request, resident)
        ids = request.block_ids.tolist()
        policy.requested(ids, block_tokens=request.block_tokens, prompt_tokens=request.prompt_tokens)
        at = len(ids)
        while at:
            start = at
            while start and ids[start - 1] in resident:
                start -= 1
            if start < at:
                _access(policy, ids[start:at])
            if not start:
                break
            path = (BlockId(ids[start - 1]),)
            at = start - 1
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
            resident.update(path)
    return counter.rates()


def _access(policy: EvictionPolicy, blocks: list[int]) -> None:
    """Tell of blocks that are there one after the other; a trace may name one twice, which a path may not."""
    if len(set(blocks)) == len(blocks):
        policy.access([BlockId(block) for block in blocks])
    else:
        for block in reversed(blocks):
            policy.access((BlockId(block),))
