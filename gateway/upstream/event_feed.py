"""One instance's KV events, kept in the residency index.

    wait until the instance is healthy and reports where it publishes
    -> subscribe -> snapshot -> follow the batches by their sequence number
       a hole       -> replay what is missing; when that can't be had, a new snapshot
       a new epoch, a lost connection, a number that was seen before, dropped events, anything that can't be read
                    -> forget what it held, and a new snapshot; the more often, the later
       the instance goes away -> forget what it held

Subscribing comes before the snapshot, so that no batch falls between them; batches that the snapshot already contains
are skipped by their number. Batches that were lost with none after them show as a number in the health check's stats
that stays ahead of ours; a snapshot that claims batches which were never published, as one that stays behind it.

A snapshot and large batches are applied in slices between which the loop does other work; large batches are decoded by
a thread, one at a time. Nothing is known of the
instance when a snapshot begins, and each slice adds blocks that it holds, parents first: half of one is only knowing
less. What is published meanwhile waits in the socket, so it comes after.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

import httpx2
import zmq
import zmq.asyncio

from gateway.http.client import FETCH_ERRORS, AnswerTooLargeError, fetch
from gateway.registry import Instance, InstanceState, Registry
from gateway.supervisor import until_one_ends
from gateway.upstream.backoff import Backoff, Reason
from gateway.upstream.sliced_work import SlicedWork
from kvcontrol.core.control import SNAPSHOT_PATH, InstanceStats
from kvcontrol.core.errors import WireError
from kvcontrol.core.events import AllBlocksCleared, KvEvent, sliced
from kvcontrol.core.ids import InstanceId, Seq
from kvcontrol.core.snapshot import MAX_SNAPSHOT_BYTES, SnapshotReader
from kvcontrol.core.wire import END_OF_REPLAY, MAX_PAYLOAD_BYTES, decode_batch, decode_seq, encode_seq
from kvcontrol.prefix_reuse import FleetIndex

_log = logging.getLogger(__name__)

_SNAPSHOT_TIMEOUT_S = 30.0
_REPLAY_TIMEOUT_S = 5.0
_BEHIND_AFTER_S = 1.0
_QUEUE_BATCHES = 100_000
_SLICE_BLOCKS = 512
"""About a millisecond and a half of work."""
_BATCHES_PER_SLICE = 16
_INLINE_BYTES = 16_384
"""Longer batches are decoded off the event loop: up to 4 ms of work, where a thread hop costs 0.1 ms."""
_REPORTS_AFTER_SNAPSHOT = 2
"""The first new report may have been asked for before the snapshot was; the second one was not."""
_OLD_NEWS_S = 60.0
"""How long after a snapshot batches may still come that it contains."""


class FeedMeter(Protocol):
    """Where a feed counts what it does."""

    def events(self, instance: InstanceId, applied: int, undecodable: int) -> None: ...

    def resync(self, instance: InstanceId, reason: str) -> None: ...


class _ResyncError(Exception):
    """What is known can't be trusted any more."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(slots=True)
class _Position:
    """How far the index has come. ``snapshot_seq`` is where it began; ``live_seq`` is the last number received from the
    socket itself; ``slices`` counts what was applied since, also within a batch.
    """

    seq: int
    snapshot_seq: int = -1
    live_seq: int = -1
    slices: int = 0


class EventFeed:
    """Follows one instance for ever; the only writer of its part of the index."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        instance: InstanceId,
        *,
        registry: Registry,
        index: FleetIndex,
        client: httpx2.AsyncClient,
        context: zmq.asyncio.Context,
        sliced: SlicedWork,
        meter: FeedMeter,
    ) -> None:
        self._instance = instance
        self._registry = registry
        self._index = index
        self._client = client
        self._context = context
        self._sliced = sliced
        self._meter = meter

    async def run(self) -> None:
        backoff = Backoff()
        clock = asyncio.get_running_loop().time
        try:
            while True:
                await self._registry.wait_until(lambda: self._stats() is not None)
                stats = self._stats()
                if stats is None:
                    continue
                started_s = clock()
                error = await self._follow_until_resync(stats)
                lasted_s = clock() - started_s
                _log.info("instance %s: resynchronizing KV events (%s)", self._instance, error)
                self._meter.resync(self._instance, error.reason)
                self._registry.settle(self._instance, str(error))
                self._index.drop(self._instance)
                await self._sliced.run(self._index.sweep())
                await asyncio.sleep(backoff.pause_s(error.reason, lasted_s))
        finally:
            self._index.drop(self._instance)

    async def _follow_until_resync(self, stats: InstanceStats) -> _ResyncError:
        """Follow until something makes a new start necessary, and return that."""
        try:
            await self._follow(stats)
        except _ResyncError as error:
            return error
        raise AssertionError("following has no end but an error")

    def _now(self) -> Instance:
        return self._registry.get(self._instance)

    def _stats(self) -> InstanceStats | None:
        now = self._now()
        return now.stats if now.state is InstanceState.HEALTHY else None

    async def _follow(self, stats: InstanceStats) -> None:
        """Subscribe and follow for ever; raises ``_ResyncError`` when a new start is necessary."""
        async with self._subscribed(_reachable(stats.events.endpoint, self._now().url)) as (socket, monitor):
            position = _Position(seq=-1)
            await self._take_snapshot(stats, position)
            await until_one_ends(
                self._read(socket, stats, position), self._watch_link(monitor), self._watch_instance(stats, position)
            )

    @asynccontextmanager
    async def _subscribed(self, endpoint: str) -> AsyncIterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _QUEUE_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise _ResyncError(Reason.BAD_ENDPOINT, f"{endpoint}: {error}") from error
            yield socket, monitor
        finally:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)

    async def _take_snapshot(self, stats: InstanceStats, position: _Position) -> None:
        try:
            snapshot = SnapshotReader(await self._fetch_snapshot())
            if snapshot.epoch != stats.epoch:
                raise _ResyncError(Reason.NEW_EPOCH, "the snapshot is of another life of the engine")
            await self._sliced.run(self._learned(snapshot))
        except WireError as error:
            self._meter.events(self._instance, 0, 1)
            raise _ResyncError(Reason.SNAPSHOT_INVALID, str(error)) from error
        position.seq = position.snapshot_seq = snapshot.seq
        self._registry.settle(self._instance)
        _log.info(
            "instance %s: snapshot of %d blocks at event batch %d",
            self._instance,
            sum(self._index.blocks_held(self._instance).values()),
            snapshot.seq,
        )

    def _learned(self, snapshot: SnapshotReader) -> Iterator[None]:
        self._index.reset(self._instance, {})
        for tier, blocks in snapshot.slices(_SLICE_BLOCKS):
            stats = self._stats()
            if stats is None or stats.epoch != snapshot.epoch:
                raise _ResyncError(Reason.INSTANCE_AWAY, "it went away while its snapshot was read")
            self._index.extend(self._instance, tier, blocks)
            yield

    async def _fetch_snapshot(self) -> bytes:
        url = self._now().url + SNAPSHOT_PATH
        try:
            async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                status, body = await fetch(self._client, "GET", url, limit_bytes=MAX_SNAPSHOT_BYTES)
        except AnswerTooLargeError as error:
            raise WireError(f"snapshot: {error}") from error
        except (*FETCH_ERRORS, TimeoutError) as error:
            raise _ResyncError(Reason.SNAPSHOT_FAILED, f"{type(error).__name__}: {error}") from error
        if status != HTTPStatus.OK:
            raise _ResyncError(Reason.SNAPSHOT_FAILED, f"status {status}")
        return body

    async def _read(self, socket: zmq.asyncio.Socket, stats: InstanceStats, position: _Position) -> None:
        since_yield = 0
        clock = asyncio.get_running_loop().time
        started_s = clock()
        while True:
            since_yield += 1
            if since_yield > _BATCHES_PER_SLICE:  # what waits in the socket is had without waiting
                since_yield = 0
                await asyncio.sleep(0)
            frames = await socket.recv_multipart()
            if len(frames) < 2:  # noqa: PLR2004 - number and payload; a topic may come first
                raise self._unreadable(1, f"an event message has {len(frames)} frames, not number and payload")
            try:
                seq = decode_seq(frames[-2])
            except WireError as error:
                raise self._unreadable(1, str(error)) from error
            if seq <= position.live_seq:
                raise _ResyncError(Reason.SEQUENCE_RESTARTED, f"{seq} after {position.live_seq}")
            position.live_seq = seq
            if seq <= position.seq:
                if clock() - started_s > _OLD_NEWS_S:
                    raise self._ahead(position, seq)
                continue
            if seq > position.seq + 1:
                await self._replay(_reachable(stats.events.replay_endpoint, self._now().url), position, until=seq)
            await self._apply(frames[-1], position)
            position.seq = seq

    async def _replay(self, endpoint: str, position: _Position, *, until: int) -> None:
        """Apply the batches after ``position`` and before ``until``; raises ``_ResyncError`` when one can't be had."""
        first = position.seq + 1
        _log.info(
            "instance %s: event batches %d to %d are missing; asking for a replay", self._instance, first, until - 1
        )
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        try:
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                socket.connect(endpoint)
                await socket.send_multipart([b"", encode_seq(Seq(first))])
                while position.seq + 1 < until:
                    frames = await socket.recv_multipart()
                    if len(frames) < 2 or frames[-2] == END_OF_REPLAY:  # noqa: PLR2004 - number and payload
                        break
                    seq = decode_seq(frames[-2])
                    if seq == position.seq + 1:
                        await self._apply(frames[-1], position)
                        position.seq = seq
        except (TimeoutError, zmq.ZMQError, WireError) as error:
            raise _ResyncError(Reason.REPLAY_FAILED, f"{type(error).__name__}: {error}") from error
        finally:
            socket.close(0)
        if position.seq + 1 < until:
            raise _ResyncError(Reason.GAP, f"batch {position.seq + 1} is no longer replayed")
        self._meter.resync(self._instance, "replayed")

    async def _apply(self, payload: bytes, position: _Position) -> None:
        try:
            if len(payload) <= _INLINE_BYTES:
                decoded = decode_batch(payload, with_tokens=False)
            else:
                decoded = await self._sliced.run_in_thread(partial(decode_batch, payload, with_tokens=False))
        except WireError as error:
            raise self._unreadable(1, str(error)) from error
        if decoded.undecodable:
            raise self._unreadable(len(decoded.undecodable), decoded.undecodable[0])
        events = decoded.batch.events
        work = self._followed(events, position)
        if sum(map(_blocks, events)) <= _SLICE_BLOCKS:
            for _ in work:
                pass
        else:
            await self._sliced.run(work)
        self._meter.events(self._instance, len(events), 0)

    def _followed(self, events: Sequence[KvEvent], position: _Position) -> Iterator[None]:
        done = 0
        for event in events:
            for part in sliced(event, _SLICE_BLOCKS):
                self._index.apply(self._instance, part)
                done += _blocks(part)
                if done >= _SLICE_BLOCKS:
                    done = 0
                    position.slices += 1
                    yield

    def _ahead(self, position: _Position, published: int) -> _ResyncError:
        """A snapshot that claims batches which nobody has published would make us deaf until they are."""
        self._meter.events(self._instance, 0, 1)
        return _ResyncError(
            Reason.SNAPSHOT_INVALID, f"it claims batch {position.snapshot_seq}, the engine published {published}"
        )

    def _unreadable(self, count: int, problem: str) -> _ResyncError:
        """What can't be read may have been a removal: nothing that is known can be trusted after it."""
        _log.warning("instance %s: unreadable KV events: %s", self._instance, problem)
        self._meter.events(self._instance, 0, count)
        return _ResyncError(Reason.UNDECODABLE, problem)

    async def _watch_link(self, monitor: zmq.asyncio.Socket) -> None:
        await monitor.recv_multipart()
        raise _ResyncError(Reason.CONNECTION_LOST)

    async def _watch_instance(self, stats: InstanceStats, position: _Position) -> None:
        """End the session when the health checks show that it can't be right any more."""
        clock = asyncio.get_running_loop().time
        seen = stats
        reports = 0
        ahead_seq, ahead_since_s = -1, 0.0
        reached = (position.seq, position.slices)
        doubts = self._now().doubts
        while True:
            last = seen
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEHIND_AFTER_S):
                    await self._registry.wait_until(
                        lambda last=last: self._stats() is not last or self._now().doubts != doubts  # type: ignore[misc]
                    )
            now = self._stats()
            if now is None:
                raise _ResyncError(Reason.INSTANCE_AWAY, self._now().reason)
            if now.epoch != stats.epoch:
                raise _ResyncError(Reason.NEW_EPOCH)
            if self._now().doubts != doubts:
                raise _ResyncError(Reason.CONTRADICTED, "answers find less cached than it announces")
            if now.events.endpoint != stats.events.endpoint:
                raise _ResyncError(Reason.NEW_ENDPOINT)
            if now.events.dropped != stats.events.dropped:
                raise _ResyncError(Reason.EVENTS_DROPPED, f"{now.events.dropped} on the engine's side")
            reports += now is not seen
            if now.events.seq < position.snapshot_seq and reports >= _REPORTS_AFTER_SNAPSHOT:
                raise self._ahead(position, now.events.seq)
            if position.seq >= ahead_seq or reached != (position.seq, position.slices):  # who gets on isn't lost
                ahead_seq, ahead_since_s = now.events.seq, clock()
                reached = (position.seq, position.slices)
            elif clock() - ahead_since_s > _BEHIND_AFTER_S:
                raise _ResyncError(Reason.BEHIND, f"at batch {position.seq}, the engine published {ahead_seq}")
            seen = now


def _blocks(event: KvEvent) -> int:
    """About how much work an event is, in blocks."""
    return 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)


def _reachable(endpoint: str, url: str) -> str:
    """An endpoint that names no host (``tcp://*:5557``) is on the instance's own."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host in {"*", "0.0.0.0", "[::]"}:  # noqa: S104 - compared, not bound
        return f"tcp://{urlsplit(url).hostname}:{port}"
    return endpoint
