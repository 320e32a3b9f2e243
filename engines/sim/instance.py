"""One simulated instance without its HTTP server: engine, event log, publisher, and the answers of ``/kv/v1``."""

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from engines.control.calls import call_at_once
from engines.control.errors import EngineUnavailableError
from engines.control.operations import SNAPSHOT, STATS, Operation
from engines.control.pins import PinControl
from engines.control.tiers import TierControl
from engines.events.log import EventLog
from engines.events.publisher import Endpoints, EventPublisher
from engines.requests.urgency import ORDINARY, Urgency
from engines.sim.behaviour import Behaviour
from engines.sim.driver import RealTime
from engines.sim.engine import SimEngine
from engines.sim.faults import Faults, LossySink
from engines.sim.pins import SimPins
from engines.sim.policies import SimPolicies
from engines.sim.profile import Profile
from engines.sim.report import offload_stats, tier_stats
from engines.sim.sequence import SimRequest
from engines.sim.sink import BlockSink
from kvcontrol.core.blocks import CacheIdentity
from kvcontrol.core.control import EventsInfo, InstanceStats, LoadStats, PrefixCacheStats, Snapshot, TierStats
from kvcontrol.core.hashing import root_hash, token_bytes
from kvcontrol.core.ids import Epoch
from kvcontrol.core.tenant import tenant_of_salt
from kvcontrol.prefix_reuse import PromptChain

ENGINE: Final = "sim"
VERSION: Final = "1"
_PUBLISHER_S: Final = 20.0


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
        tiers = self.engine.tiers
        self._operations: dict[bytes, Operation] = {
            **TierControl(
                lambda: None if tiers is None else tiers.hierarchy,
                call_at_once,
                reset=self.pins.reset,
                remedy="its profile has no blocks of DDR",
                unit_bytes=shape.block_bytes,
            ).table(),
            **PinControl(self.pins, call_at_once).table(),
            **self.policies.table(),
        }

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
        self.policies.shadow_timer.follow(loop)

    def close(self) -> None:
        """Stop the engine, then tell what it said last."""
        self.policies.shadow_timer.close()
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

    async def ask(self, operation: bytes, body: bytes) -> bytes:
        """Return an operation's answer; raises ``RefusedError``, or ``EngineUnavailableError`` for a publisher that
        doesn't get to it.
        """
        try:
            if operation == STATS:
                return msgspec.json.encode(await self.stats())
            if operation == SNAPSHOT:
                return msgspec.json.encode(await self.snapshot())
        except TimeoutError as error:
            raise EngineUnavailableError(f"the event publisher did not answer within {_PUBLISHER_S:g} s") from error
        return self._operations[operation](body)

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
