"""LMDeploy's prefix cache as policy control sees it: who chooses its victims, and whose requests shadows follow."""

from collections.abc import Callable
from typing import Any, Final

from engines.control.errors import RefusedError
from engines.control.eviction import EvictionCounts, MakePolicy
from engines.lmdeploy.trie.eviction import TrieEviction, eviction_of
from kvcontrol.kv_policy import EvictionPolicy, ShadowPolicies

_RECURRENT: Final = "this model keeps recurrent state: LMDeploy's own eviction chooses what leaves HBM"
_OWN: Final = "lmdeploy"
"""The name of LMDeploy's own eviction, where it chooses."""


class TrieCache:
    """See ``EngineCache``. ``ways_back`` are the seconds of computing and of loading a block that was evicted."""

    def __init__(self, engine: Any, ways_back: Callable[[], tuple[float | None, float | None]]) -> None:
        self._engine = engine
        self._ways_back = ways_back

    @property
    def capacity_blocks(self) -> int:
        blocks = self._engine.scheduler.block_manager.num_gpu_blocks
        return int(blocks - self._engine.cache_config.num_reserved_gpu_blocks)

    @property
    def policy_name(self) -> str:
        policy = self.policy
        return _OWN if policy is None else policy.name

    @property
    def policy(self) -> EvictionPolicy | None:
        eviction = self._eviction
        return None if eviction is None or eviction.failed else eviction.policy

    def counts(self) -> EvictionCounts:
        stats, eviction = self._engine.scheduler.block_trie.stats, self._eviction
        is_ours = eviction is not None and not eviction.failed
        return EvictionCounts(
            resident_blocks=eviction.resident_blocks if eviction is not None and is_ours else 0,
            evicted_blocks=eviction.evicted_blocks if eviction is not None and is_ours else 0,
            query=int(stats.num_query_tokens),
            hit=int(stats.num_hit_tokens),
        )

    @property
    def is_swapping(self) -> bool:
        eviction = self._eviction
        return eviction is not None and eviction.has_successor

    def begin_swap(self, make: MakePolicy) -> None:
        eviction = self._required()
        if eviction.failed:
            raise RefusedError("LMDeploy's own eviction has taken over after an error; restart the instance")
        eviction.begin_swap(make())

    def continue_swap(self, blocks: int) -> int:
        return self._required().continue_swap(blocks)

    def end_swap(self) -> None:
        eviction = self._required()
        eviction.ways_back = self._ways_back
        eviction.end_swap()

    @property
    def shadows(self) -> ShadowPolicies | None:
        eviction = self._eviction
        return None if eviction is None else eviction.shadows.policies

    def watch(self, shadows: ShadowPolicies) -> None:
        eviction = self._eviction
        if eviction is not None:
            eviction.settle_now()  # what was asked for until now is not for these to count
            eviction.shadows.policies = shadows
        elif shadows.candidates:
            raise RefusedError(_RECURRENT)

    @property
    def _eviction(self) -> TrieEviction | None:
        return eviction_of(self._engine.scheduler.block_trie)

    def _required(self) -> TrieEviction:
        eviction = self._eviction
        if eviction is None:
            raise RefusedError(_RECURRENT)
        return eviction
