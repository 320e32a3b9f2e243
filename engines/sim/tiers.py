"""The tiers below a simulated engine: the real runtime over memory of no bytes, and links that take their time.

``HierarchyManager`` decides as it does in an engine; its transfers are carried at once, by a crew that the engine
calls. What they would take is added up, lane by lane, on the clock that the runtime measures its bandwidths with; so
its estimates, and ``KVAgent``'s choice between loading and computing, are those of an engine with such links. A lane is
busy until all that it was given would be over: later loads wait for it, and writes to NVMe are carried only while
their lane is free.

Simplified: a block counts as moved when its transfer is ordered, so what is on its way already takes its place.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from engines.sim.profile import EngineShape, Links
from engines.sim.sink import BlockSink
from kvcontrol.agent import KVAgent, LoadPlan
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.kv_policy import EvictionPolicy, make_policy
from kvcontrol.kv_runtime import BlockRecord, HierarchyManager, TicketId
from kvcontrol.kv_runtime.arena import HostArena
from kvcontrol.kv_runtime.backend_protocol import BlockStatus, Move
from kvcontrol.kv_runtime.backends.metadata import DurableMetadataBackend, MetadataBackend
from kvcontrol.kv_runtime.crew import SteppedCrew
from kvcontrol.kv_runtime.hierarchy_config import HierarchyConfig
from kvcontrol.kv_runtime.lane import LaneName
from kvcontrol.kv_runtime.migrator_config import MigratorConfig
from kvcontrol.kv_runtime.quota import QuotaManager
from kvcontrol.kv_runtime.residency import Loss
from kvcontrol.kv_runtime.ticket import Change, Finished, SaveRequest
from kvcontrol.prefix_reuse import PromptChain

_UNIT: Final = 1
"""What the runtime believes a block's size to be; it is scaled where anybody is told."""
_DURABLE_BATCH, _SAVE_BATCH, _LOAD_BATCH = 4, 36, 146
_QUEUE_BLOCKS: Final = 1 << 20
_AT_ONCE: Final = (LaneName.HBM_TO_DDR, LaneName.NVME_TO_DDR, LaneName.DDR_TO_HBM)

MakePolicy = Callable[[str, int], EvictionPolicy]
"""A policy by its name, for so many blocks."""


def shipped_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """Return one of the policies that ship; see ``MakePolicy``."""
    return make_policy(name, capacity_blocks=capacity_blocks)


class LinkClock:
    """The runtime's clock: the engine's, and during a transfer how much of it is over."""

    def __init__(self, links: Links, block_bytes: int) -> None:
        self.now_s = 0.0
        self.spent_s: dict[LaneName, float] = {}
        self._ahead_s = 0.0
        self._block_s = {
            LaneName.HBM_TO_DDR: block_bytes / links.hbm_to_ddr_bytes_per_s,
            LaneName.DDR_TO_HBM: block_bytes / links.ddr_to_hbm_bytes_per_s,
            LaneName.DDR_TO_NVME: block_bytes / links.ddr_to_nvme_bytes_per_s,
            LaneName.NVME_TO_DDR: block_bytes / links.nvme_to_ddr_bytes_per_s,
        }

    def __call__(self) -> float:
        return self.now_s + self._ahead_s

    def spend(self, lane: LaneName, blocks: int) -> None:
        """Blocks go through a lane."""
        seconds = blocks * self._block_s[lane]
        self._ahead_s += seconds
        self.spent_s[lane] = self.spent_s.get(lane, 0.0) + seconds

    def take_spent(self) -> dict[LaneName, float]:
        """Return what each lane was used since the last call."""
        spent, self.spent_s = self.spent_s, {}
        self._ahead_s = 0.0
        return spent


class _EngineMemory(MetadataBackend):
    """HBM: what is read or written takes the link's time. ``corrupt`` is the share of loaded blocks that come wrong."""

    def __init__(self, capacity_blocks: int, clock: LinkClock, faults: Callable[[], bool]) -> None:
        super().__init__(CacheTier.HBM, capacity_blocks=capacity_blocks, block_bytes=_UNIT)
        self._clock_ = clock
        self._faults = faults

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        self._clock_.spend(LaneName.HBM_TO_DDR, len(moves))
        return super().read(moves, arena)

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        self._clock_.spend(LaneName.DDR_TO_HBM, len(moves))
        return [BlockStatus.CORRUPT if self._faults() else each for each in super().write(moves, arena)]


class _Disk(DurableMetadataBackend):
    """NVMe, likewise."""

    def __init__(self, capacity_blocks: int, clock: LinkClock, faults: Callable[[], bool]) -> None:
        super().__init__(capacity_blocks=capacity_blocks, block_bytes=_UNIT)
        self._clock_ = clock
        self._faults = faults

    def read(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        self._clock_.spend(LaneName.NVME_TO_DDR, len(moves))
        return [BlockStatus.CORRUPT if self._faults() else each for each in super().read(moves, arena)]

    def write(self, moves: Sequence[Move], arena: HostArena) -> list[BlockStatus]:
        self._clock_.spend(LaneName.DDR_TO_NVME, len(moves))
        return super().write(moves, arena)


class _LinkedHierarchy(HierarchyManager):
    """One that knows of loads that were ordered and, on the engine's clock, are not over."""

    wait_s: Callable[[Sequence[BlockId]], float]

    def estimate_load_s(self, block_ids: Sequence[BlockId]) -> float | None:
        seconds = super().estimate_load_s(block_ids)
        return None if seconds is None else seconds + self.wait_s(block_ids)


class Loaded(NamedTuple):
    """The first ``blocks`` of a plan are in HBM at ``ready_s``; ``by_tier`` says where they came from."""

    blocks: int
    ready_s: float
    by_tier: dict[CacheTier, int]


@dataclass(slots=True)
class TierCounters:
    """Requests, as in ``OffloadStats``."""

    loads: int = 0
    failed_loads: int = 0
    saves: int = 0
    tail_saves: int = 0


class SimTiers:
    """See the module's text; ``close`` it at the end. ``shape`` must have DDR."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        shape: EngineShape,
        links: Links,
        *,
        sink: BlockSink,
        make: MakePolicy,
        rng: random.Random,
        corrupt_share: float = 0.0,
    ) -> None:
        self.counters = TierCounters()
        self.block_bytes = shape.block_bytes
        self.witness: Callable[[Sequence[Change]], None] | None = None
        """Is told of what the tiers gain and lose."""
        self.block_tokens = shape.block_tokens
        self._sink = sink
        self._width = shape.block_tokens * TOKEN_BYTES
        self._clock = LinkClock(links, shape.block_bytes)
        self._free_s: dict[LaneName, float] = dict.fromkeys(LaneName, 0.0)
        self._seen_s = 0.0
        self._finished: dict[TicketId, Finished] = {}
        self._crew = SteppedCrew()
        self._arena = HostArena(slots=shape.ddr_blocks, block_bytes=_UNIT)

        def faults() -> bool:
            return corrupt_share > 0 and rng.random() < corrupt_share

        self.hierarchy = _LinkedHierarchy(
            HierarchyConfig(
                migrator=MigratorConfig(
                    batch_bytes=_DURABLE_BATCH * _UNIT,
                    engine_batch_bytes=_SAVE_BATCH * _UNIT,
                    load_batch_bytes=_LOAD_BATCH * _UNIT,
                    queue_blocks=_QUEUE_BLOCKS,
                )
            ),
            engine=_EngineMemory(shape.hbm_blocks, self._clock, faults),
            arena=self._arena,
            durable=_Disk(shape.nvme_blocks, self._clock, faults) if shape.nvme_blocks else None,
            make_policy=lambda: make(shape.tier_policy, shape.ddr_blocks),
            quotas=QuotaManager(),
            clock=self._clock,
            crew=self._crew,
        )
        self.hierarchy.wait_s = self._wait_s
        self.agent = KVAgent(self.hierarchy, clock=self._clock)

    def plan_load(self, path: PromptChain, first: int, limit: int, now_s: float) -> LoadPlan | None:
        """See ``KVAgent.plan_load``."""
        if first >= limit:
            return None
        self._clock.now_s = now_s
        return self.agent.plan_load(path, first, limit)

    def load(self, plan: LoadPlan, slots: Sequence[int], now_s: float) -> Loaded:
        """Order a load into as many slots as the plan has blocks, and say how it ends. The plan is over with it."""
        self._clock.now_s = now_s
        hierarchy = self.hierarchy
        by_tier: dict[CacheTier, int] = {}
        for block in plan.block_ids:
            tier = hierarchy.locate(block)[0]
            by_tier[tier] = by_tier.get(tier, 0) + 1
        ticket = hierarchy.load(plan.block_ids, slots, expected_s=plan.expected_s)
        ready_s = self._carry(now_s)
        good = self._finished.pop(ticket).leading_ok
        self.agent.release(plan)
        if good < len(plan.block_ids):
            self.counters.failed_loads += 1
        if good:
            self.counters.loads += 1
        return Loaded(blocks=good, ready_s=ready_s, by_tier=by_tier)

    def save(  # noqa: PLR0913 - a path, where it lies, whose it is and when
        self, path: PromptChain, slots: Sequence[int], tenant: str, limit: int, now_s: float, *, tail: bool
    ) -> None:
        """Save what of a path's first ``limit`` blocks, which lie in ``slots``, is nowhere below HBM."""
        if not limit:
            return
        self._clock.now_s = now_s
        plan = self.agent.plan_save(path, 0, limit)
        if plan is None:
            return
        keys, tokens = path.keys, path.block_tokens
        requests = [
            SaveRequest(
                BlockRecord(
                    key=keys[place], parent=keys[place - 1] if place else None, tokens=tokens[place], tenant=tenant
                ),
                slots[place],
            )
            for place in plan.places
        ]
        ticket = self.hierarchy.save(requests, heads_held=plan.heads_held).ticket_id
        self._carry(now_s)
        self.agent.saved(plan)
        self._finished.pop(ticket)
        self.counters.saves += 1
        self.counters.tail_saves += tail

    def computed(self, tokens: int, seconds: float) -> None:
        """Note how long prompt tokens took to compute."""
        self.agent.costs.computed(tokens, seconds)

    def work(self, now_s: float) -> None:
        """Let what waits for a lane go on."""
        self._clock.now_s = now_s
        self._carry(now_s)

    def forget(self, keys: Collection[BlockHash] | None = None) -> dict[CacheTier, int]:
        """Drop blocks, None for all, and return how many of each tier."""
        hierarchy = self.hierarchy
        before = self._dropped()
        hierarchy.drop(None if keys is None else [each for key in keys if (each := hierarchy.find(key)) is not None])
        self._poll()
        return {tier: blocks - before[tier] for tier, blocks in self._dropped().items()}

    def _dropped(self) -> dict[CacheTier, int]:
        return {tier: stats.losses.get(Loss.DROPPED, 0) for tier, stats in self.hierarchy.stats().tiers.items()}

    def close(self) -> None:
        """Let go of the runtime."""
        self.hierarchy.close()
        self._arena.close()

    def _carry(self, now_s: float) -> float:
        """Carry all that may be carried now; returns when the loads of it are over."""
        crew = self._crew
        self._poll()
        self._write_down(now_s)
        while sum([crew.run_one(lane) for lane in _AT_ONCE]):
            self._poll()
        free_s = self._free_s
        ready_s = now_s
        for lane, seconds in self._clock.take_spent().items():
            free_s[lane] = max(now_s, free_s[lane]) + seconds
            if lane is not LaneName.HBM_TO_DDR:
                ready_s = max(ready_s, free_s[lane])
        self._poll()
        self._seen_s = now_s
        self._write_down(now_s)
        return ready_s

    def _write_down(self, now_s: float) -> None:
        """Write to NVMe what its lane has had time for since the last look, and begin what it has time for now."""
        lane = LaneName.DDR_TO_NVME
        start_s = max(self._free_s[lane], self._seen_s)
        while start_s <= now_s and self._crew.run_one(lane):
            start_s += self._clock.take_spent().get(lane, 0.0)
            self._free_s[lane] = start_s
            self._poll()

    def _wait_s(self, block_ids: Sequence[BlockId]) -> float:
        """How long a load of blocks would wait for those before it."""
        until_s = self._free_s[LaneName.DDR_TO_HBM]
        if any(self.hierarchy.locate(block)[:1] == (CacheTier.NVME,) for block in block_ids):
            until_s = max(until_s, self._free_s[LaneName.NVME_TO_DDR])
        return max(0.0, until_s - self._clock.now_s)

    def _poll(self) -> None:
        def content(tokens: bytes) -> bytes:
            return tokens if len(tokens) == self._width else b""  # what only stands for tokens is told nobody

        progress = self.hierarchy.poll()
        for finished in progress.finished:
            self._finished[finished.ticket_id] = finished
        for (tier, gained), run in groupby(progress.changes, key=lambda change: (change.tier, change.gained)):
            if gained:
                self._sink.stored_all(
                    [(each.record.key, each.record.parent, content(each.record.tokens)) for each in run], tier=tier
                )
            else:
                self._sink.removed_all([each.record.key for each in run], tier=tier)
        if self.witness is not None and progress.changes:
            self.witness(progress.changes)
