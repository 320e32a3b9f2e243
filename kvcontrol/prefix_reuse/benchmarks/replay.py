"""Replays of real traces through one engine's prefix index: how much of the prompts was computed before?

Mooncake's conversation trace names 512-token blocks by chained ids, the last partial block included; the agentic trace
names 64-token blocks. A replayed block is one "token" of the index, its id, so that the index sees exactly the trace's
prefix structure. Each request is looked up, counted, then inserted. With room for everything this is the ceiling that
no cache can pass.
"""

import gzip
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from kvcontrol.core import CacheIdentity, token_bytes
from kvcontrol.prefix_reuse.index import PrefixReuseIndex
from kvcontrol.prefix_reuse.keys import BlockKeys

MOONCAKE = "mooncake/conversation_trace.jsonl.gz"
AGENTIC = "agentic/agentic_dev.jsonl.gz"
_MOONCAKE_BLOCK_TOKENS = 512
_AGENTIC_BLOCK_TOKENS = 64
_SESSION_BLOCKS = 1 << 20
"""Ids of the agentic trace are local to a session; sessions are laid this far apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt: the ids of its blocks in order, how many tokens a block has, and how many the prompt."""

    block_ids: "array[int]"
    block_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Shares of all blocks and of all prompt tokens that were found as a prefix, and of requests that found any."""

    requests: int
    block_hit_rate: float
    token_hit_rate: float
    request_hit_rate: float


def mooncake(path: Path) -> Iterator[Request]:
    """Read Mooncake's trace; raises ``OSError`` when it isn't there."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            said = json.loads(line)
            yield Request(
                block_ids=array("I", said["hash_ids"]),
                block_tokens=_MOONCAKE_BLOCK_TOKENS,
                prompt_tokens=said["input_length"],
            )


def agentic(path: Path) -> Iterator[Request]:
    """Read the agentic trace, one session after another; raises ``OSError`` when it isn't there."""
    return (request for _, request in _timed_agentic(path))


def agentic_together(path: Path) -> Iterator[Request]:
    """Read the agentic trace as if all sessions had started at once, ordered by their times; raises ``OSError``."""
    return (request for _, request in sorted(_timed_agentic(path), key=itemgetter(0)))


def _timed_agentic(path: Path) -> Iterator[tuple[float, Request]]:
    sessions: dict[str, int] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            said = json.loads(line)
            base = sessions.setdefault(said["session"], len(sessions)) * _SESSION_BLOCKS
            ids = array("I")
            for start, length in said["runs"]:
                ids.extend(range(base + start, base + start + length))
            yield said["t"], Request(block_ids=ids, block_tokens=_AGENTIC_BLOCK_TOKENS, prompt_tokens=said["in"])


def replay(requests: Iterator[Request], *, capacity_blocks: int) -> ReplayResult:
    """Run all requests through an index that holds ``capacity_blocks``."""
    identity = CacheIdentity(model="trace", revision="0", kv_dtype="none", block_size_tokens=1)
    index = PrefixReuseIndex(BlockKeys(identity), capacity_blocks=capacity_blocks)
    count = blocks = hit_blocks = tokens = hit_tokens = hit_requests = 0
    for request in requests:
        packed = token_bytes(request.block_ids)
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


__all__ = ["AGENTIC", "MOONCAKE", "ReplayResult", "Request", "agentic", "agentic_together", "mooncake", "replay"]
