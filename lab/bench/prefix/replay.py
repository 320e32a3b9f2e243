"""Replays of real traces through one engine's prefix index: how much of the prompts was computed before?

Mooncake's conversation trace names 512-token blocks by chained ids, the last partial block included; the agentic trace
names 64-token blocks. A replayed block is one "token" of the index, its id, so that the index sees exactly the trace's
prefix structure. Each request is looked up, counted, then inserted. With room for everything this is the ceiling that
no cache can pass.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvcontrol.core import CacheIdentity, token_bytes
from lab.research.prefix_index.index import PrefixReuseIndex
from lab.research.prefix_index.keys import BlockKeys
from lab.traces import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Shares of all blocks and of all prompt tokens that were found as a prefix, and of requests that found any."""

    requests: int
    block_hit_rate: float
    token_hit_rate: float
    request_hit_rate: float


def replay(requests: Iterable[Request], *, capacity_blocks: int) -> ReplayResult:
    """Run all requests through an index that holds ``capacity_blocks``."""
    identity = CacheIdentity(model="trace", revision="0", kv_dtype="none", block_size_tokens=1)
    index = PrefixReuseIndex(BlockKeys(identity), capacity_blocks=capacity_blocks)
    count = blocks = hit_blocks = tokens = hit_tokens = hit_requests = 0
    for request in requests:
        packed = token_bytes(array("I", request.block_ids))
        matched = index.lookup(packed).matched_length
        count += 1
        blocks += len(request.block_ids)
        hit_blocks += matched
        tokens += request.prompt_tokens
        hit_tokens += min(matched * request.block_tokens, request.prompt_tokens)
        hit_requests += matched > 0
        index.insert(packed, request.block_ids)
    return ReplayResult(
        requests=count,
        block_hit_rate=hit_blocks / blocks,
        token_hit_rate=hit_tokens / tokens,
        request_hit_rate=hit_requests / count,
    )
