"""The door beside an engine: which of a prompt's blocks lie below HBM, and whether loading them beats computing them.

It joins what decides nothing about engines (``kv_runtime``: where blocks are) with what decides nothing about memory
(``prefix_reuse``: what a prompt shares with the past). An engine's connector, or a simulated engine, asks it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcontrol.core.ids import BlockId
from kvcontrol.kv_policy import CostBenefitModel, PrefillSpeed
from kvcontrol.kv_runtime import HierarchyManager, Prompt
from kvcontrol.prefetcher import Prefetcher
from kvcontrol.prefix_reuse import PrefixReuseMetrics, PromptChain

PROBE_EVERY_S = 1.0
"""A path that is declined is never measured again; so from time to time a load is tried against the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Blocks ``first_block`` to ``last_block`` - 1 of a prompt, held below HBM until the plan is loaded or released.

    ``expected_s`` is how long the load should take, None where nothing was measured.
    """

    first_block: int
    block_ids: tuple[BlockId, ...]
    expected_s: float | None = None

    @property
    def last_block(self) -> int:
        """The block after the last."""
        return self.first_block + len(self.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Places in a prompt of blocks to save; ``held`` is what of it lies below HBM already, held until ``saved``."""

    places: tuple[int, ...]
    held: tuple[BlockId, ...]
    heads_held: bool
    """Whether that is all of the rest: none of it is still on its way."""


class KVAgent:
    """Plans loads for one engine. Belongs to the engine's thread; ``metrics`` and ``declined`` may be read from any."""

    def __init__(
        self,
        hierarchy: HierarchyManager,
        *,
        clock: Callable[[], float] = time.perf_counter,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self.hierarchy = hierarchy
        self.metrics = PrefixReuseMetrics()
        self.prefetcher = prefetcher
        """Learns of every prompt that is looked up; its owner lets it ``work`` where there is one."""
        self.declined = 0
        self._clock = clock
        self._tried_s = -math.inf

    @property
    def costs(self) -> CostBenefitModel:
        """What computing and loading cost, as measured."""
        return self.hierarchy.costs

    @property
    def prefill(self) -> PrefillSpeed:
        """How fast the engine computes."""
        return self.hierarchy.costs.prefill

    def plan_save(self, chain: PromptChain, offered: int, limit: int) -> SavePlan | None:
        """Plan to save what of a prompt's first ``limit`` blocks is nowhere below HBM; a fraction of 1 us a block.

        None when nothing is missing behind the ``offered`` blocks that an earlier plan of the same prompt covered. What
        is there already is held, so that a save doesn't push out its own path.
        """
        found = self.hierarchy.survey(chain.keys, chain.block_tokens, limit)
        if not found.missing or found.missing[-1] < offered:
            return None
        held = self.hierarchy.claims.hold(found.readable)
        return SavePlan(places=tuple(found.missing), held=held, heads_held=len(held) + len(found.missing) == limit)

    def saved(self, plan: SavePlan) -> None:
        """End a plan whose save has ended, or give it up."""
        self.hierarchy.claims.release(plan.held)

    def requested(self, chain: PromptChain, limit: int, tenant: str) -> None:
        """Follow a request's prompt, of which the first ``limit`` blocks can be reused: once, before its first plan."""
        size = chain.block_size_tokens
        self.hierarchy.requested(
            Prompt(
                keys=chain.keys[:limit],
                tokens=chain.block_tokens[:limit],
                tenant=tenant,
                block_tokens=size,
                prompt_tokens=limit * size,
            )
        )

    def plan_load(
        self, chain: PromptChain, first: int, limit: int, *, whatever_it_costs: bool = False, counts: bool = True
    ) -> LoadPlan | None:
        """Plan to load the longest run of blocks from ``first`` on, before ``limit``; None when that isn't worth it.

        Tokens and parents are compared, block by block: another lineage under an equal hash ends the run and is
        counted as a collision. Not worth it means: by measured bandwidth and prefill speed, the loads that wait
        already included, computing takes less time. Until both were measured, and once every ``PROBE_EVERY_S`` after
        that, loading is tried all the same; always with ``whatever_it_costs``, where the time of computing isn't all
        that counts. Without ``counts`` the look-up is in no statistics. About 1 us a block.
        """
        started = self._clock()
        if self.prefetcher is not None:
            self.prefetcher.observe(chain.keys[:limit])
        found = self._run(chain, first, limit)
        if counts:
            self.metrics.looked_up(
                blocks=limit - first,
                matched_blocks=len(found),
                tokens=(limit - first) * chain.block_size_tokens,
                matched_tokens=len(found) * chain.block_size_tokens,
                took_s=self._clock() - started,
            )
        if not found:
            return None
        load_s = self.hierarchy.estimate_load_s(found)
        saves_s = self.costs.load_saves_s(len(found) * chain.block_size_tokens, load_s)
        declined = saves_s is not None and saves_s < 0 and started - self._tried_s < PROBE_EVERY_S
        if declined and not whatever_it_costs:
            self.declined += 1
            return None
        self._tried_s = started
        self.hierarchy.claims.hold(found)
        self.hierarchy.check_ahead(found)
        return LoadPlan(first_block=first, block_ids=tuple(found), expected_s=load_s)

    def held_blocks(self, chain: PromptChain, first: int, limit: int) -> int:
        """Return how long a run ``plan_load`` would find; nothing is held or counted. About 1 us a block."""
        return len(self.hierarchy.find_run(chain.keys, chain.block_tokens, first, limit).block_ids)

    def shorten(self, plan: LoadPlan, blocks: int) -> LoadPlan:
        """Return the plan for its first ``blocks`` blocks; the rest is released."""
        if blocks >= len(plan.block_ids):
            return plan
        self.hierarchy.claims.release(plan.block_ids[blocks:])
        return LoadPlan(
            first_block=plan.first_block,
            block_ids=plan.block_ids[:blocks],
            expected_s=self.hierarchy.estimate_load_s(plan.block_ids[:blocks]),
        )

    def release(self, plan: LoadPlan) -> None:
        """Give up a plan, or end one that was loaded."""
        self.hierarchy.claims.release(plan.block_ids)

    def _run(self, chain: PromptChain, first: int, limit: int) -> list[BlockId]:
        run = self.hierarchy.find_run(chain.keys, chain.block_tokens, first, limit)
        if run.collided:
            self.metrics.collided()
        return run.block_ids
