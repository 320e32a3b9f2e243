"""Other routers' formulas as routing policies, for studies: none of their code, all of them with our exact index.

They are given what our own policies are: who holds how much of a prompt, and what each has to do. So what is compared
is the choice, not how well a router knows its fleet; theirs mostly know less. Where a formula needs what a ``Query``
doesn't say, the policy's text says what stands for it.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gateway.routing import RoutingPolicy
from lab.simulate.peers.aibrix import AibrixPrefixCache
from lab.simulate.peers.dynamo import DynamoCost
from lab.simulate.peers.llm_d import LlmDScorers
from lab.simulate.peers.sglang import SglangCacheAware

PEERS: Mapping[str, Callable[[int], RoutingPolicy]] = MappingProxyType(
    {
        "sglang_cache_aware": lambda _: SglangCacheAware(),
        "dynamo_cost": lambda _: DynamoCost(),
        "llm_d_scorers": lambda tokens: LlmDScorers(capacity_tokens=tokens),
        "aibrix_prefix_cache": lambda _: AibrixPrefixCache(),
    }
)
"""By the name that ``kvgate simulate --routing`` takes; made for instances whose HBM has room for so many tokens."""

__all__ = ["PEERS", "AibrixPrefixCache", "DynamoCost", "LlmDScorers", "SglangCacheAware"]
