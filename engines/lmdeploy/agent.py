"""Our agent in the engine process: it watches the block trie, publishes its events and answers control requests.

One ``EngineAgent`` per LMDeploy ``Engine``, made when the engine is and closed with it. The api_server, mostly another
process, reaches it over the control endpoint (``http/admin.py``); what the agent must know from there travels on
LMDeploy's own engine configuration as a ``LaunchInfo``.
"""

import asyncio
import dataclasses
import multiprocessing
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from engines.control.operations import SNAPSHOT, STATS, Operation
from engines.control.pins import PinControl
from engines.control.tier_metrics import TierCounts, hbm_counts
from engines.control.tiers import TierControl
from engines.events.log import EventLog
from engines.events.publisher import Endpoints, EventPublisher, without_publisher
from engines.lmdeploy.engine_calls import EngineCalls
from engines.lmdeploy.file_digests import FileDigests
from engines.lmdeploy.identity import identity_of
from engines.lmdeploy.loop_lag import LagReport, LoopLag
from engines.lmdeploy.offload.report import offload_stats, tier_counts, tier_stats
from engines.lmdeploy.offload.setup import build_hierarchy, tiers_of
from engines.lmdeploy.pauses import StepPauses
from engines.lmdeploy.pd.part import PdPart
from engines.lmdeploy.pd.request import role_of
from engines.lmdeploy.policies import EnginePolicies
from engines.lmdeploy.schedule.step_metrics import StepCounts
from engines.lmdeploy.schedule.step_operations import StepOperations
from engines.lmdeploy.settings import EngineSettings
from engines.lmdeploy.trie.events import TrieTracker, forget_cache
from engines.lmdeploy.trie.eviction import eviction_of
from engines.lmdeploy.trie.pins import TriePins
from engines.lmdeploy.warm_start import warm_up_s_of
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import (
    EventsInfo,
    InstanceStats,
    LoadStats,
    OffloadStats,
    PrefixCacheStats,
    Snapshot,
    TierStats,
)
from kvcontrol.core.garbage import freeze_garbage
from kvcontrol.core.ids import Epoch
from kvcontrol.core.pd import PdStats
from kvcontrol.core.policy_control import PolicyReport

COUNTERS = b"counters"

_LAUNCH = "kvgate_launch"
_AGENT = "kvgate_agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """The api_server's data for the engine process: the served model's name and the control socket."""

    model: str
    control_endpoint: str | None


class EventCounters(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``counters``: the api_server's metrics."""

    seq: int
    stored: int
    removed: int
    cleared: int
    dropped: int
    resyncs: int
    hook_errors: int
    eviction_errors: int
    publisher_errors: int
    resident_blocks: dict[CacheTier, int]
    tiers: dict[CacheTier, TierStats] = {}
    counts: dict[CacheTier, TierCounts] = {}
    offload: OffloadStats | None = None
    pd: PdStats | None = None
    policies: PolicyReport | None = None
    refused_swaps: int = 0
    loop_lag: LagReport | None = None
    pinned_blocks: dict[CacheTier, int] = {}
    steps: StepCounts | None = None


class EngineAgent:
    """Watches one engine; raises ``EndpointError``, ``WeightsError`` or ``IdentityError`` when that can't be set up."""

    def __init__(self, engine: Any, settings: EngineSettings, launch: LaunchInfo) -> None:
        self._engine = engine
        self.epoch = Epoch(uuid.uuid4().hex)
        self._started_at_s = time.time()
        identity = identity_of(engine, model=launch.model, digests=FileDigests(settings.digests_folder))
        self._weights = identity.revision
        self.calls = EngineCalls()
        self.loop_lag = LoopLag()
        self.tiers = tiers_of(engine.cache_config)
        self.pauses = StepPauses(engine, self.tiers)
        self.policies = EnginePolicies(engine, self.tiers, self.calls)
        self.steps = StepOperations(engine)
        self.pins = TriePins(
            engine.scheduler, self.tiers, share=settings.pin_share, longest_tokens=int(engine.max_session_len)
        )

        def make_log(on_pending: Callable[[], None]) -> EventLog:
            return EventLog(
                block_size_tokens=identity.block_size_tokens,
                clock=time.time,
                on_pending=on_pending,
                max_pending_blocks=settings.events_pending_blocks,
                replay_batches=settings.events_replay_batches,
            )

        self.publisher = EventPublisher(
            make_log,
            endpoints=Endpoints(
                events=settings.events_endpoint,
                replay=settings.replay_endpoint,
                control=launch.control_endpoint,
            ),
            operations={
                SNAPSHOT: lambda publisher, _body: msgspec.json.encode(self._snapshot(publisher)),
                **without_publisher(self._operations()),
            },
        )
        self.tracker = TrieTracker(self.publisher.log, identity)
        self.tracker.watch(engine.scheduler.block_trie)
        self.tracker.witness = self.pins
        self.pd: PdPart | None = None
        try:
            self.pd = PdPart(engine, settings, self.calls, epoch=self.epoch, identity=lambda: self.tracker.identity)
            if self.tiers is not None:
                self.tiers.announcer.witness = self.pins
                self.tiers.start(partial(build_hierarchy, settings), identity, self.publisher.log, engine.scheduler)
                self.pd.share(self.tiers)
            self.policies.begin(settings)
        except BaseException:
            if self.pd is not None:
                self.pd.close()
            self.publisher.close()
            raise
        self.publisher.start()
        if multiprocessing.parent_process() is not None:  # the engine's own process, not a test's
            freeze_garbage()

    def _operations(self) -> dict[bytes, Operation]:
        tiers = self.tiers
        return {
            STATS: lambda _: msgspec.json.encode(self.stats()),
            COUNTERS: lambda _: msgspec.json.encode(self.counters()),
            **TierControl(
                lambda: None if tiers is None else tiers.hierarchy,
                self.calls,
                reset=self.pins.reset,
                remedy="start it with KVGATE_ENGINE_DDR_BYTES set",
            ).table(),
            **PinControl(self.pins, self.calls).table(),
            **self.policies.table(),
            **self.steps.table(),
        }

    def close(self) -> None:
        self.loop_lag.stop()
        if self.pd is not None:
            self.pd.close()
        self.pins.close()
        if (eviction := eviction_of(self._engine.scheduler.block_trie)) is not None:
            eviction.shadows.timer.close()
        if self.tiers is not None:
            self.tiers.close()
        self.publisher.close()

    def stats(self) -> InstanceStats:
        """Read the engine's state now; any thread: only reads of single values, none of which creates anything."""
        engine = self._engine
        scheduler, counters = engine.scheduler, self.publisher.log.counters()
        trie = scheduler.block_trie
        hits = trie.stats
        return InstanceStats(
            epoch=self.epoch,
            engine="lmdeploy",
            engine_version=_lmdeploy_version(),
            device=str(engine.engine_config.device_type),
            started_at_s=self._started_at_s,
            context_length_tokens=int(engine.max_session_len),
            identity=self.tracker.identity,
            events=EventsInfo(
                endpoint=self.publisher.endpoint,
                replay_endpoint=self.publisher.replay_endpoint,
                seq=counters.seq,
                dropped=counters.dropped,
                hook_errors=self.tracker.errors,
            ),
            tiers=self._tier_stats(),
            load=_load(scheduler),
            prefix_cache=PrefixCacheStats(query_tokens=int(hits.num_query_tokens), hit_tokens=int(hits.num_hit_tokens)),
            offload=None if self.tiers is None else offload_stats(self.tiers),
            role=role_of(engine.engine_config),
            transports={} if self.pd is None else self.pd.transports(),
            pd=None if self.pd is None else self.pd.stats(),
            warm_up_s=warm_up_s_of(engine),
        )

    def counters(self) -> EventCounters:
        """Return the totals for ``/metrics``; any thread."""
        log = self.publisher.log
        trie = self._engine.scheduler.block_trie
        eviction = eviction_of(trie)
        stats = self._tier_stats()
        return EventCounters(
            **dataclasses.asdict(log.counters()),
            hook_errors=self.tracker.errors,
            eviction_errors=0 if eviction is None else eviction.errors,
            publisher_errors=self.publisher.errors,
            resident_blocks=log.resident_blocks(),
            tiers=stats,
            counts={CacheTier.HBM: hbm_counts(stats[CacheTier.HBM], hit_tokens=int(trie.stats.num_hit_tokens))}
            | ({} if self.tiers is None else tier_counts(self.tiers)),
            offload=None if self.tiers is None else offload_stats(self.tiers),
            pd=None if self.pd is None else self.pd.stats(),
            policies=self.policies.report(),
            refused_swaps=self.policies.refused,
            loop_lag=self.loop_lag.report(),
            pinned_blocks=self.pins.counts(),
            steps=self.steps.counts(),
        )

    def _tier_stats(self) -> dict[CacheTier, TierStats]:
        engine, blocks = self._engine, self._engine.scheduler.block_manager
        capacity = int(blocks.num_gpu_blocks - engine.cache_config.num_reserved_gpu_blocks)
        hbm = TierStats(
            capacity_blocks=capacity,
            used_blocks=capacity - int(blocks.get_num_free_gpu_blocks()),
            cached_blocks=self.publisher.log.resident_blocks().get(CacheTier.HBM, 0),
            block_bytes=_block_bytes(engine),
        )
        return {CacheTier.HBM: hbm} | ({} if self.tiers is None else tier_stats(self.tiers))

    def pool_gone(self) -> None:
        """Drop the blocks in HBM, whose pins stay; the tiers below keep theirs. The engine's thread."""
        self.pins.let_go()
        forget_cache(self._engine)
        if self.pd is not None:
            self.pd.pool_gone()
        if self.tiers is not None:
            self.tiers.announce_all()

    def weights_changed(self) -> None:
        """Drop the blocks of the old weights, and root later blocks in a new revision; the engine's thread.

        Nobody knows what the weights are now, so the revision is like no other: not that of another instance, nor of
        another time.
        """
        self.pins.clear()
        forget_cache(self._engine)
        if self.pd is not None:
            self.pd.weights_changed()
        identity = dataclasses.replace(self.tracker.identity, revision=f"{self._weights}+{uuid.uuid4().hex}")
        self.tracker.rebase(identity)
        if self.tiers is not None:
            self.tiers.rebase(identity)

    def _snapshot(self, publisher: EventPublisher) -> Snapshot:
        resident = publisher.snapshot()
        return Snapshot.of(
            epoch=self.epoch,
            seq=resident.seq,
            identity=self.tracker.identity,
            residents=resident.tiers,
        )


def agent_of(engine: Any) -> EngineAgent | None:
    """Return the agent of an LMDeploy ``Engine``, None when it has none."""
    agent: EngineAgent | None = getattr(engine, _AGENT, None)
    return agent


def loop_started(engine: Any) -> None:
    """Note that this thread's event loop is the engine's from now on."""
    agent = agent_of(engine)
    if agent is not None:
        loop = asyncio.get_running_loop()
        agent.calls.attach(loop)
        agent.loop_lag.start(loop)
        agent.pins.follow(loop)
        if (eviction := eviction_of(engine.scheduler.block_trie)) is not None:
            eviction.shadows.timer.follow(loop)
        if agent.tiers is not None:
            agent.tiers.follow(loop)


def launch_of(engine_config: Any) -> LaunchInfo | None:
    """Return the api_server's note on its engine configuration, None without an api_server."""
    launch: LaunchInfo | None = getattr(engine_config, _LAUNCH, None)
    return launch


def note_launch(engine_config: Any, launch: LaunchInfo) -> None:
    """Write the agent's data into LMDeploy's engine configuration, which is pickled to the engine process."""
    setattr(engine_config, _LAUNCH, launch)


# What takes the place of LMDeploy's symbols (the tables are in hooks/).


def engine_init(original: Callable[..., None]) -> Callable[..., None]:
    """``Engine.__init__``: a finished engine gets its agent."""

    def __init__(self: Any, model_path: str, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # called by this name
        original(self, model_path, *args, **kwargs)
        settings = EngineSettings.load()
        launch = launch_of(self.engine_config) or LaunchInfo(
            model=model_path, control_endpoint=settings.control_endpoint
        )
        setattr(self, _AGENT, EngineAgent(self, settings, launch))

    return __init__


def engine_loop_finally(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """``Engine._loop_finally``: close the agent when the engine's loop has ended for any reason."""

    def _loop_finally(self: Any) -> None:
        try:
            original(self)
        finally:
            agent = agent_of(self)
            if agent is not None:
                agent.close()

    return _loop_finally


def _load(scheduler: Any) -> LoadStats:
    """Count sequences by state. Not through ``num_running()`` and its like: those create missing entries in a
    defaultdict, and a second thread doing that beside the engine's could lose a sequence.
    """
    from lmdeploy.pytorch.messages import MessageStatus

    by_status = scheduler.seq_manager._status_seq_map  # noqa: SLF001
    running = len(by_status.get(MessageStatus.RUNNING, ()))
    waiting = sum(
        len(by_status.get(status, ()))
        for status in (MessageStatus.WAITING, MessageStatus.READY, MessageStatus.WAITING_FOR_REMOTE_KVS)
    )
    return LoadStats(running=running, waiting=waiting, max_batch_size=int(scheduler.scheduler_config.max_batches))


def _block_bytes(engine: Any) -> int:
    """One logical block over all layers, on one rank; 0 when the workers are elsewhere (Ray) and don't say."""
    agent = getattr(engine.executor, "model_agent", None)
    plan = getattr(agent, "block_cache_plan", None)
    return 0 if plan is None else int(plan.logical_block_nbytes)


def _lmdeploy_version() -> str:
    import lmdeploy

    return str(lmdeploy.__version__)
