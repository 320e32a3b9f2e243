"""One simulated instance without its HTTP server: engine, event log, publisher, and the answers of ``/kv/v1``."""

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from engines.control.block_list import block_list
from engines.control.operation_bodies import block_hashes, parsed
from engines.control.pin_ledger import PIN_BODIES
from engines.events.log import EventLog
from engines.events.publisher import Endpoints, EventPublisher, RefusedError
from engines.lmdeploy.schedule.urgency import ORDINARY, Urgency
from engines.sim.behaviour import Behaviour
from engines.sim.driver import RealTime
from engines.sim.engine import SimEngine
from engines.sim.faults import Faults, LossySink
from engines.sim.pins import SimPins
from engines.sim.policies import SimPolicies
from engines.sim.profile import Profile
from engines.sim.report import offload_stats, quota_of, quotas, tier_stats
from engines.sim.sequence import SimRequest
from engines.sim.sink import BlockSink
from engines.sim.tiers import SimTiers
from kvcontrol.core.blocks import CacheIdentity, CacheTier
from kvcontrol.core.control import EventsInfo, InstanceStats, LoadStats, PrefixCacheStats, Snapshot, TierStats
from kvcontrol.core.hashing import root_hash, token_bytes
from kvcontrol.core.ids import Epoch
from kvcontrol.core.prefix_control import InvalidateRequest, Invalidation, Pin, PinRequest, Unpinned, UnpinRequest
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.core.tier_control import (
    BlockList,
    BlockQuery,
    CacheReset,
    MigrateRequest,
    Migration,
    QuotaChange,
    Quotas,
)
from kvcontrol.kv_runtime import QuotaError
from kvcontrol.prefix_reuse import PromptChain

ENGINE: Final = "sim"
VERSION: Final = "1"
_PUBLISHER_S: Final = 20.0

_ALLOWED: Final[Mapping[type, str]] = {
    MigrateRequest: "hashes (names of blocks, in hex) and tier (DDR or NVME)",
    QuotaChange: "tenant, tier (DDR or NVME) and quota: null, or guaranteed_bytes, burst_bytes, weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """What is started. ``model`` is the name that clients say."""

    profile: Profile
    model: str
    seed: int = 0
    jitter: float = 0.0
    faults: Faults = field(default_factory=Faults)
    events_endpoint: str = "tcp://127.0.0.1:*"
    replay_endpoint: str = "tcp://127.0.0.1:*"


class SimInstance:
    """Made and used on one event loop, but for the publisher's thread; ``EndpointError`` when it can't publish."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.epoch = Epoch(uuid.uuid4().hex)
        self.rng = random.Random(f"{spec.seed} requests")  # noqa: S311 - to be repeatable is what it is for
        shape = spec.profile.engine
        self.identity = CacheIdentity(
            model=spec.model,
            revision=f"sim-{spec.profile.name}",
            kv_dtype=shape.kv_dtype,
            block_size_tokens=shape.block_tokens,
        )
        self._started_at_s = time.time()

        def make_log(on_pending: Callable[[], None]) -> EventLog:
            return EventLog(block_size_tokens=shape.block_tokens, clock=time.time, on_pending=on_pending)

        self.publisher = EventPublisher(
            make_log, endpoints=Endpoints(events=spec.events_endpoint, replay=spec.replay_endpoint)
        )
        self.driver = RealTime(self._engine)
        self.engine = self.driver.engine
        self.policies = SimPolicies(self.engine)
        self.pins = SimPins(self.engine)

    def _engine(self, listener: RealTime) -> SimEngine:
        spec, faults = self.spec, self.spec.faults
        sink: BlockSink = self.publisher.log
        if faults.lose_events:
            sink = LossySink(sink, share=faults.lose_events, rng=random.Random(f"{spec.seed} events"))  # noqa: S311
        behaviour = Behaviour(seed=spec.seed, jitter=spec.jitter, slow=faults.slow, corrupt_share=faults.corrupt)
        return SimEngine(spec.profile, listener=listener, sink=sink, behaviour=behaviour, stream=True)

    def start(self) -> None:
        """Begin, on the loop that runs."""
        self.publisher.start()
        self.driver.start()
        loop = asyncio.get_running_loop()
        self.pins.follow(loop)
        self.policies.follow(loop)

    def close(self) -> None:
        """Stop the engine, then tell what it said last."""
        self.policies.close()
        self.pins.close()
        self.driver.close()
        self.publisher.close()

    def request(
        self, request_id: str, prompt: list[int], answer: list[int], *, salt: str, urgency: Urgency = ORDINARY
    ) -> SimRequest:
        """Return a prompt, and the answer that it will get, as the engine takes them."""
        packed = token_bytes([*prompt, *answer])
        size = self.identity.block_size_tokens
        chain = PromptChain(
            root_hash(self.identity, salt=salt),
            block_size_tokens=size,
            source=lambda first, last: packed[4 * first : 4 * last],
        )
        chain.grow((len(prompt) + len(answer)) // size)
        return SimRequest(
            request_id=request_id,
            chain=chain,
            prompt_tokens=len(prompt),
            output_tokens=len(answer),
            tenant=tenant_of_salt(salt),
            urgency=urgency,
        )

    # What /kv/v1 answers.

    async def stats(self) -> InstanceStats:
        """``GET /kv/v1/stats``, after what waits has been published; ``TimeoutError`` as for the snapshot."""
        async with asyncio.timeout(_PUBLISHER_S):
            log = await asyncio.wrap_future(self.publisher.call(lambda publisher: publisher.log.counters()))
        engine, faults, shape = self.engine, self.spec.faults, self.spec.profile.engine
        return InstanceStats(
            epoch=self.epoch,
            engine=ENGINE,
            engine_version=VERSION,
            device=ENGINE,
            started_at_s=self._started_at_s,
            context_length_tokens=shape.context_tokens,
            identity=self.identity,
            events=EventsInfo(
                endpoint=self.publisher.endpoint,
                replay_endpoint=self.publisher.replay_endpoint,
                seq=log.seq,
                dropped=log.dropped,
            ),
            tiers={tier: self._reported(each) for tier, each in tier_stats(engine).items()},
            load=LoadStats(
                running=engine.running, waiting=engine.waiting, max_batch_size=faults.reported(shape.max_batch)
            ),
            prefix_cache=PrefixCacheStats(
                query_tokens=engine.counters.query_tokens, hit_tokens=engine.counters.hit_tokens
            ),
            offload=None if engine.tiers is None else offload_stats(engine.tiers),
        )

    def _reported(self, stats: TierStats) -> TierStats:
        return msgspec.structs.replace(stats, capacity_blocks=self.spec.faults.reported(stats.capacity_blocks))

    async def snapshot(self) -> Snapshot:
        """``GET /kv/v1/snapshot``; ``TimeoutError`` when the publisher doesn't get to it."""
        async with asyncio.timeout(_PUBLISHER_S):
            resident = await asyncio.wrap_future(self.publisher.call(EventPublisher.snapshot))
        return Snapshot.of(epoch=self.epoch, seq=resident.seq, identity=self.identity, residents=resident.tiers)

    def blocks(self, query: dict[str, object]) -> BlockList:
        """``GET /kv/v1/blocks``."""
        try:
            asked = msgspec.convert(query, BlockQuery, strict=False)
        except msgspec.ValidationError as error:
            raise RefusedError(f"what was asked is not what is allowed: {error}") from error
        tiers = self._tiers()
        found = block_list(tiers.hierarchy, asked)
        sized = [msgspec.structs.replace(each, size_bytes=tiers.block_bytes) for each in found.blocks]
        return BlockList(total=found.total, blocks=sized)

    def quotas(self) -> Quotas:
        """``GET /kv/v1/quotas``."""
        return quotas(self._tiers())

    def set_quota(self, body: bytes) -> Quotas:
        """``PUT /kv/v1/quotas``."""
        change = parsed(body, QuotaChange, _ALLOWED)
        tiers = self._tiers()
        self._need(change.tier)
        try:
            quota = None if change.quota is None else quota_of(change.quota, tiers.block_bytes)
            tiers.hierarchy.quotas.set(change.tenant, change.tier, quota)
        except QuotaError as error:
            raise RefusedError(str(error)) from error
        return self.quotas()

    def migrate(self, body: bytes) -> Migration:
        """``POST /kv/v1/migrate``."""
        request = parsed(body, MigrateRequest, _ALLOWED)
        hierarchy = self._tiers().hierarchy
        self._need(request.tier)
        keys = block_hashes(request.hashes)
        found = {key: hierarchy.find(key) for key in dict.fromkeys(keys)}
        ids = [block_id for block_id in found.values() if block_id is not None]
        if ids:
            (hierarchy.prefetch if request.tier is CacheTier.DDR else hierarchy.demote)(ids)
        return Migration(started=len(ids), unknown=[key.hex() for key, block_id in found.items() if block_id is None])

    def reset(self) -> CacheReset:
        """``POST /kv/v1/prefix-cache/reset``."""
        return CacheReset(dropped=self.pins.reset())

    def pin(self, body: bytes) -> Pin:
        """``POST /kv/v1/prefixes/pin``."""
        request = parsed(body, PinRequest, PIN_BODIES)
        keys = block_hashes(request.hashes)
        self.pins.pin(keys, request.ttl_s)
        tip = keys[-1].hex()
        return next(each for each in self.pins.report().pins if each.hash == tip)

    def unpin(self, body: bytes) -> Unpinned:
        """``POST /kv/v1/prefixes/unpin``."""
        [tip] = block_hashes([parsed(body, UnpinRequest, PIN_BODIES).hash], field="hash")
        return Unpinned(unpinned=self.pins.unpin(tip))

    def invalidate(self, body: bytes) -> Invalidation:
        """``POST /kv/v1/prefixes/invalidate``."""
        return self.pins.invalidate(block_hashes(parsed(body, InvalidateRequest, PIN_BODIES).hashes))

    def _tiers(self) -> SimTiers:
        if self.engine.tiers is None:
            raise RefusedError("this instance has no tiers below HBM; its profile has no blocks of DDR")
        return self.engine.tiers

    def _need(self, tier: CacheTier) -> None:
        there = self._tiers().hierarchy.stats().tiers
        if tier not in there:
            raise RefusedError(f"this instance has no {tier} tier; it has {', '.join(there)}")


__all__ = ["ENGINE", "InstanceSpec", "SimInstance"]
