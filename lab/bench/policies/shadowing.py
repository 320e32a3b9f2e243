"""What shadow policies cost: the CPU time of one thread per request, for all candidates together.

Chats of up to 400 blocks (25,600 tokens in blocks of 64; as a mean longer than Mooncake's conversations), but of no
more than a sixteenth of the cache: each request is a chat that has grown, or a new one after a shared beginning. The
limit of load is off while it is measured. The shadows are full, and evict, before anything is timed.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcontrol.kv_policy.shadow import MOST_LOAD, ShadowPolicies
from kvcontrol.kv_policy.spec import PolicySpec

_SHARED_BLOCKS = 8
_MOST_BLOCKS = 400
_TURN_BLOCKS = 24
_GOING = 2_000
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowCost:
    """``requests_per_s_at_limit`` is how many requests a second cost the share of a core that shadows may take."""

    candidates: int
    capacity_blocks: int
    sampled_ratio: float
    requests: int
    prompt_blocks: float
    us_per_request: float
    requests_per_s_at_limit: float


def measure(candidates: Sequence[PolicySpec], *, capacity_blocks: int, requests: int, warm_up: int) -> ShadowCost:
    """Return the mean over ``requests``, after as many that only fill the shadows as ``warm_up`` says."""
    shadows = ShadowPolicies(candidates, capacity_blocks=capacity_blocks, timer=lambda: 0.0)
    most = min(_MOST_BLOCKS, capacity_blocks // 16)
    stream = _prompts(random.Random(0), most)  # noqa: S311 - reproducible, not secret
    for _ in range(warm_up):
        shadows.requested(next(stream))
        shadows.settle()
    spent_s = 0.0
    blocks = 0
    for _ in range(requests):
        prompt = next(stream)
        blocks += len(prompt)
        started_s = time.thread_time()
        shadows.requested(prompt)
        shadows.settle()
        spent_s += time.thread_time() - started_s
    report = shadows.report()
    return ShadowCost(
        candidates=len(candidates),
        capacity_blocks=capacity_blocks,
        sampled_ratio=report.sampled_ratio,
        requests=requests,
        prompt_blocks=blocks / requests,
        us_per_request=spent_s / requests * 1e6,
        requests_per_s_at_limit=MOST_LOAD * requests / spent_s,
    )


def _prompts(rng: random.Random, most_blocks: int) -> Iterator[list[bytes]]:
    fresh = 0

    def new(blocks: int) -> list[bytes]:
        nonlocal fresh
        fresh += blocks
        return [number.to_bytes(_KEY_BYTES, "big") for number in range(fresh - blocks, fresh)]

    shared = new(_SHARED_BLOCKS)
    chats: list[list[bytes]] = []
    while True:
        if len(chats) < _GOING or rng.random() < 1 / 3:
            chats.append(shared + new(rng.randrange(_TURN_BLOCKS, most_blocks)))
            del chats[: len(chats) - _GOING]
        chat = chats[int(len(chats) * rng.random() ** 0.5)]
        if len(chat) < most_blocks:
            chat.extend(new(_TURN_BLOCKS))
        yield list(chat)
