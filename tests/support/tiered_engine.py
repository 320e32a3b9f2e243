"""An engine with tiers below it in the test's own process, and what must hold once nothing is under way."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from engines.lmdeploy.agent import EngineAgent, agent_of
from engines.lmdeploy.offload.tiers import EngineTiers
from kvcontrol.agent import KVAgent
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import OffloadStats
from kvcontrol.core.ids import BlockHash
from kvcontrol.kv_runtime import HierarchyManager
from tests.support.engine import ANSWER_WITHIN_S, LocalEngine
from tests.support.models import random_prompt

BLOCK = 16
NEW_TOKENS = 24
PROMPTS = [random_prompt(290 + 7 * seed, seed) for seed in range(6)]
"""Contexts of 19 to 21 blocks: a pool of 32 holds one of them."""
REST_WITHIN_S = 60.0
_SALT = "kvgate_cache_salt"


@dataclass(slots=True)
class TieredEngine:
    """``with TieredEngine.start(...)``; settings come from the environment."""

    local: LocalEngine
    cached: list[int] = field(default_factory=list)
    """What each request that has ended reported as cached, in the order of their ends."""
    _next_session: int = 1

    @classmethod
    def start(cls, model: Path, **config: Any) -> Self:
        return cls(LocalEngine.start(model, **{"num_gpu_blocks": 32, "enable_prefix_caching": True} | config))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.local.__exit__()

    # What there is.

    @property
    def agent(self) -> EngineAgent:
        agent = agent_of(self.local.engine)
        assert agent is not None
        return agent

    @property
    def tiers(self) -> EngineTiers:
        assert self.agent.tiers is not None
        return self.agent.tiers

    @property
    def hierarchy(self) -> HierarchyManager:
        assert self.tiers.hierarchy is not None
        return self.tiers.hierarchy

    @property
    def door(self) -> KVAgent:
        assert self.tiers.agent is not None
        return self.tiers.agent

    @property
    def scheduler(self) -> Any:
        return self.local.engine.scheduler

    @property
    def offload(self) -> OffloadStats:
        stats = self.agent.stats().offload
        assert stats is not None
        return stats

    # What can be done.

    def run(
        self, *prompts: Sequence[int], new_tokens: int = 8, salt: str = "", adapter: str | None = None
    ) -> list[list[int]]:
        """Run all prompts at once and return the new tokens of each."""

        async def all_of_them() -> list[list[int]]:
            asked = (self.ask(prompt, new_tokens=new_tokens, salt=salt, adapter=adapter) for prompt in prompts)
            return await asyncio.gather(*asked)

        return self.do(all_of_them)

    def do(self, work: Callable[[], Any]) -> Any:
        """Run a coroutine on the engine's loop."""

        async def bounded() -> Any:
            self.local.engine.start_loop()
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await work()

        return self.local.runner.run(bounded())

    async def ask(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int = 8,
        salt: str = "",
        adapter: str | None = None,
        cancel: Callable[[int], Any] | None = None,
    ) -> list[int]:
        """One greedy request; ``cancel(session)`` is awaited beside it, then the request is cancelled."""
        from lmdeploy.messages import GenerationConfig, ResponseType

        config = GenerationConfig(max_new_tokens=new_tokens, top_k=1, temperature=1.0, ignore_eos=True)
        if salt:
            setattr(config, _SALT, salt)
        session, self._next_session = self._next_session, self._next_session + 1
        instance = self.local.engine.create_instance()

        async def give_up() -> None:
            assert cancel is not None
            await cancel(session)
            await instance.async_cancel(session)

        giving_up = None if cancel is None else asyncio.create_task(give_up())
        tokens: list[int] = []
        cached = 0
        allowed = {ResponseType.SUCCESS, ResponseType.FINISH} | ({ResponseType.CANCEL} if cancel else set())
        async for output in instance.async_stream_infer(session, list(prompt), gen_config=config, adapter_name=adapter):
            assert output.status in allowed, output.status
            tokens.extend(output.token_ids)
            cached = cached if output.req_metrics is None else int(output.req_metrics.cached_tokens)
        self.cached.append(cached)
        if giving_up is not None:
            giving_up.cancel()
            await asyncio.gather(giving_up, return_exceptions=True)
        return tokens

    def evict_hbm(self) -> None:
        """Empty the engine's own prefix cache; what lies below stays."""
        self.scheduler.block_trie.evict(1 << 30)

    def forget_all(self) -> None:
        """Empty all tiers."""

        async def forget() -> None:
            self.evict_hbm()
            self.tiers.forget()

        self.rest()
        self.do(forget)

    def resident(self) -> dict[CacheTier, set[BlockHash]]:
        """What has been announced to be where."""
        with self.agent.publisher.log._lock:
            return {tier: set(blocks) for tier, blocks in self.agent.publisher.log._resident.items() if blocks}

    def rest(self) -> None:
        """Wait until nothing is under way any more."""
        self._until(self._at_rest)

    def _until(self, condition: Callable[[], bool]) -> None:
        async def it_holds() -> None:
            until_s = time.monotonic() + REST_WITHIN_S
            while not condition():
                assert time.monotonic() < until_s, f"still under way: {self.hierarchy.stats()}"
                await asyncio.sleep(0.02)

        self.do(it_holds)

    def _at_rest(self) -> bool:
        """Whether every transfer has ended and was collected: until then its blocks count as held, not as used.

        Collects them: the timer that does so between steps belongs to an engine's own process.
        """
        self.tiers.have_settled()
        planner = self.tiers.planner
        lanes = self.hierarchy.stats().lanes.values()
        return bool(
            planner is not None
            and planner.is_idle
            and self.hierarchy._at_rest
            and not any(lane.queued_blocks or lane.running_blocks for lane in lanes)
            and not self.scheduler.sessions
        )

    def _is_let_go(self) -> bool:
        """Whether no block is held."""
        return self._at_rest() and not any(tier.held_blocks for tier in self.hierarchy.stats().tiers.values())

    def check(self) -> None:
        """At rest, nothing may be left of any request: no block, no lease, no hold, no plan."""
        self._until(self._is_let_go)
        self.hierarchy.check_integrity()
        scheduler, planner = self.scheduler, self.tiers.planner
        assert planner is not None
        assert not planner._requests
        assert not scheduler.kv_save_coordinator._leases
        assert not scheduler.kv_load_coordinator._loads
        assert not scheduler.kv_load_coordinator._prefill_targets
        assert not self.hierarchy.held()
        assert self.used_hbm_blocks() == self.trie_blocks()
        assert self.offload.worker_faults == 0

    def used_hbm_blocks(self) -> int:
        """Blocks of the engine's pool that somebody has."""
        stats = self.agent.stats().tiers[CacheTier.HBM]
        return stats.used_blocks

    def trie_blocks(self) -> int:
        """Blocks that the engine's prefix cache keeps; each of them once."""

        def below(node: Any) -> list[int]:
            return [block for child in node.children.values() for block in (int(child.block_id), *below(child))]

        blocks = [block for root in self.scheduler.block_trie._roots.values() for block in below(root)]
        assert len(set(blocks)) == len(blocks)
        counts = self.scheduler.block_manager.allocator.get_ref_count(np.array(blocks, dtype=np.int64))
        assert (counts == 1).all(), f"blocks of the prefix cache with references besides its own: {counts}"
        return len(blocks)


def since(before: OffloadStats, tiered: TieredEngine, name: str) -> int:
    """By how much a total grew."""
    return int(getattr(tiered.offload, name)) - int(getattr(before, name))


def visit(tiered: TieredEngine, expected: list[list[int]], *, rounds: int = 2) -> None:
    """Ask all contexts again and again, which together don't fit into HBM; all tokens must be right."""
    for _ in range(rounds):
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert tiered.run(prompt, new_tokens=NEW_TOKENS) == [tokens]


__all__ = ["BLOCK", "NEW_TOKENS", "PROMPTS", "TieredEngine", "since", "visit"]
