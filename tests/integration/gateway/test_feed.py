"""A feed learns a big snapshot while the loop goes on with other things; what happens meanwhile comes after it."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
import zmq.asyncio

from gateway.registry import HealthLoop, InstanceSpec, LoadTracker, Registry
from gateway.registry.checks import CheckRules
from gateway.telemetry import Metrics, Telemetry
from gateway.upstream import EventFeed, SlicedWork, Timeouts
from kvcontrol.core import BlockHash, BlockRemoved, BlockStored, CacheTier, InstanceId
from kvcontrol.core.wire import MAX_BATCH_BLOCKS, Decoded, decode_batch
from kvcontrol.prefix_reuse import FleetIndex
from tests.support.control_client import control_client
from tests.support.running_gateway import eventually
from tests.support.scripted_cache import ScriptedCache
from tests.support.scripted_engine import ScriptedEngine

BLOCKS = 300_000
WITHIN_S = 120.0
TIMEOUTS = Timeouts(connect_s=WITHIN_S, first_byte_s=WITHIN_S, idle_s=WITHIN_S, hung_s=WITHIN_S)


class Following:
    """Feeds of several engines over one index."""

    def __init__(self, index: FleetIndex, registry: Registry, caches: dict[InstanceId, ScriptedCache]) -> None:
        self.index = index
        self.registry = registry
        self.caches = caches

    def known(self, instance: InstanceId) -> int:
        return self.index.blocks_held(instance).get(CacheTier.HBM, 0)

    async def subscribed(self, instance: InstanceId) -> None:
        """Publish a block and its removal until both are known: from then on nothing that is published is lost."""
        cache, marker = self.caches[instance], BlockHash(b"marker" + bytes(10))
        async with asyncio.timeout(WITHIN_S):
            while instance not in self.index.match([marker]):
                await cache.publish(
                    BlockStored(block_hashes=(marker,), parent=None, token_ids=(), block_size_tokens=16)
                )
                await asyncio.sleep(0.02)
            await cache.publish(BlockRemoved(block_hashes=(marker,)))
            while self.index.match([marker]):
                await asyncio.sleep(0.02)

    async def watched(self, until: int) -> dict[InstanceId, list[int]]:
        """Return how many blocks were known of each instance at each turn of the loop until all are known."""
        seen: dict[InstanceId, list[int]] = {name: [] for name in self.caches}
        async with asyncio.timeout(WITHIN_S):
            while any(self.known(name) != until for name in self.caches):
                for name, each in seen.items():
                    each.append(self.known(name))
                await asyncio.sleep(0)
        for name, each in seen.items():
            each.append(self.known(name))
        return seen


@asynccontextmanager
async def following(*names: str, blocks: int) -> AsyncIterator[Following]:
    async with AsyncExitStack() as stack:
        engines = {InstanceId(name): ScriptedEngine() for name in names}
        for engine in engines.values():
            await stack.enter_async_context(engine.started())
        caches = {name: engine.cache for name, engine in engines.items() if engine.cache is not None}
        for cache in caches.values():
            cache.hold(blocks)
        registry = Registry(
            [InstanceSpec(id=name, url=engine.url) for name, engine in engines.items()],
            rules=CheckRules(unhealthy_after=3),
        )
        client = await stack.enter_async_context(control_client(connect_s=TIMEOUTS.connect_s))
        context = stack.enter_context(zmq.asyncio.Context())
        index, sliced = FleetIndex(), SlicedWork()
        tasks = []
        for name in engines:
            health = HealthLoop(
                name,
                registry=registry,
                load=LoadTracker(engines),
                client=client,
                interval_s=WITHIN_S,
                timeout_s=WITHIN_S,
            )
            await health.check()
            feed = EventFeed(
                name,
                registry=registry,
                index=index,
                client=client,
                context=context,
                sliced=sliced,
                meter=Telemetry(Metrics()),
            )
            tasks.append(asyncio.create_task(feed.run()))
        try:
            yield Following(index, registry, caches)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_loop_turns_hundreds_of_times_while_a_big_snapshot_is_applied() -> None:
    async with following("a", blocks=BLOCKS) as feeds:
        seen = (await feeds.watched(BLOCKS))[InstanceId("a")]
        grown = [after - before for before, after in pairwise(seen)]
        assert min(grown) >= 0
        assert max(grown) <= BLOCKS // 100
        assert len(set(seen)) > 100
        feeds.index.check_integrity()


async def test_several_snapshots_at_once_take_turns() -> None:
    blocks = 20_000
    async with following("a", "b", "c", blocks=blocks) as feeds:
        seen = await feeds.watched(blocks)
        grown = [sum(after) - sum(before) for before, after in pairwise(zip(*seen.values(), strict=True))]
        assert max(grown) <= 3 * blocks // 100  # of one of them at a time


async def test_what_happens_while_a_snapshot_is_applied_comes_after_it() -> None:
    async with following("a", blocks=BLOCKS) as feeds:
        name = InstanceId("a")
        cache = feeds.caches[name]
        await eventually(lambda: feeds.known(name) > 0, WITHIN_S)
        assert feeds.known(name) < BLOCKS
        first, last = (tuple(list(cache.resident)[cut]) for cut in (slice(99, 0, -1), slice(-1, -100, -1)))
        await cache.remove(first)
        await cache.remove(last)
        fresh = BlockHash(b"fresh" + bytes(11))
        await cache.publish(BlockStored(block_hashes=(fresh,), parent=None, token_ids=(), block_size_tokens=16))
        assert feeds.known(name) < BLOCKS, "the snapshot was applied before anything could happen meanwhile"
        await eventually(lambda: feeds.known(name) == BLOCKS - 2 * 99 + 1, WITHIN_S)
        assert feeds.index.match([fresh])[name].blocks == 1
        assert not feeds.index.match([first[0]])
        assert not feeds.index.match([last[0]])
        assert not feeds.index.is_ragged(name)


async def test_an_instance_that_goes_away_under_its_snapshot_is_forgotten_at_once() -> None:
    async with following("a", blocks=BLOCKS) as feeds:
        name = InstanceId("a")
        await eventually(lambda: feeds.known(name) > 0, WITHIN_S)
        feeds.registry.checks.connection_failed(name, "refused")
        assert 0 < feeds.known(name) < BLOCKS
        most = 0
        while known := feeds.known(name):
            most = max(most, known)
            await asyncio.sleep(0)
        assert most < BLOCKS
        feeds.index.check_integrity()


async def test_a_snapshot_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.upstream.event_feed.MAX_SNAPSHOT_BYTES", 1_000)
    async with following("a", blocks=100) as feeds:
        await eventually(lambda: feeds.registry.get(InstanceId("a")).settled, WITHIN_S)
        assert (
            feeds.registry.get(InstanceId("a")).blocks_problem == "snapshot_invalid: snapshot: longer than 1000 bytes"
        )
        assert feeds.known(InstanceId("a")) == 0


async def test_the_loop_turns_while_the_largest_batches_are_decoded() -> None:
    """As often as it does while a thread does the same work on its own."""
    many = [["BlockRemoved", [*range(40)]]] * (MAX_BATCH_BLOCKS // 40)
    payload = msgspec.msgpack.encode([0.0, many])
    async with following("a", blocks=1) as feeds:
        name = InstanceId("a")
        await eventually(lambda: feeds.known(name) == 1, WITHIN_S)
        await feeds.subscribed(name)
        decoded = asyncio.Event()
        threads = set()

        def watched(payload: bytes, *, with_tokens: bool) -> Decoded:
            threads.add(threading.get_ident())
            found = decode_batch(payload, with_tokens=with_tokens)
            loop.call_soon_threadsafe(decoded.set)
            return found

        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gateway.upstream.event_feed.decode_batch", watched)
            await feeds.caches[name].publish_raw(payload)
            ticks = 0
            async with asyncio.timeout(WITHIN_S):
                while not decoded.is_set():
                    ticks += 1
                    await asyncio.sleep(0)
        assert threading.get_ident() not in threads
        assert ticks > 10
        await feeds.caches[name].remove(list(feeds.caches[name].resident))
        await eventually(lambda: feeds.known(name) == 0, WITHIN_S)


@pytest.mark.parametrize("removing", [False, True], ids=["stored", "removed"])
async def test_a_big_batch_is_applied_in_slices_too(removing: bool) -> None:  # noqa: FBT001 - a parameter
    count = 100_000
    async with following("a", blocks=0) as feeds:
        name = InstanceId("a")
        cache = feeds.caches[name]
        blocks = tuple(BlockHash(place.to_bytes(16, "big")) for place in range(count))
        await feeds.subscribed(name)
        stored = BlockStored(block_hashes=blocks, parent=None, token_ids=(), block_size_tokens=16)
        await cache.publish(stored)
        if removing:
            await eventually(lambda: feeds.known(name) == count, WITHIN_S)
            await cache.publish(BlockRemoved(block_hashes=blocks[::-1]))
        seen = (await feeds.watched(0 if removing else count))[name]
        assert max(abs(after - before) for before, after in pairwise(seen)) <= count // 100
        assert len(set(seen)) > 100
        assert not feeds.index.is_ragged(name)
        feeds.index.check_integrity()
