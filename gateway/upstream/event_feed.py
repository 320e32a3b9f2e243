"""One instance's KV events, kept in the residency index.

    wait until the instance is healthy and reports where it publishes
    -> subscribe -> snapshot -> follow the batches by their sequence number
       a hole       -> replay what is missing; when that can't be had, a new snapshot
       a new epoch, a lost connection, a number that was seen before, dropped events -> a new snapshot
       the instance goes away -> forget what it held

Subscribing comes before the snapshot, so that no batch falls between them; batches that the snapshot already contains
are skipped by their number. Batches that were lost with none after them show as a number in the health check's stats
that stays ahead of ours.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from gateway.registry import Instance, InstanceState, Registry
from kvcontrol.core.control import SNAPSHOT_PATH, InstanceStats, Residents, Snapshot
from kvcontrol.core.errors import IdentityError, WireError
from kvcontrol.core.ids import InstanceId, Seq
from kvcontrol.core.wire import END_OF_REPLAY, decode_batch, decode_seq, encode_seq
from kvcontrol.prefix_reuse import FleetIndex

_log = logging.getLogger(__name__)

_SNAPSHOT_TIMEOUT_S = 30.0
_REPLAY_TIMEOUT_S = 5.0
_RETRY_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_BEHIND_AFTER_S = 1.0
_QUEUE_BATCHES = 100_000


class FeedMeter(Protocol):
    """Where a feed counts what it does."""

    def events(self, instance: InstanceId, applied: int, undecodable: int) -> None: ...

    def resync(self, instance: InstanceId, reason: str) -> None: ...


class _ResyncError(Exception):
    """What is known can't be trusted any more; ``reason`` is one word from a small fixed set."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(slots=True)
class _Position:
    """How far the index has come. ``live_seq`` is the last number received from the socket itself."""

    seq: int
    live_seq: int = -1


class EventFeed:
    """Follows one instance for ever; the only writer of its part of the index."""

    def __init__(  # noqa: PLR0913 - wired once, by name
        self,
        instance: InstanceId,
        *,
        registry: Registry,
        index: FleetIndex,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        meter: FeedMeter,
    ) -> None:
        self._instance = instance
        self._registry = registry
        self._index = index
        self._session = session
        self._context = context
        self._meter = meter

    async def run(self) -> None:
        pause_s = _RETRY_PAUSE_S
        try:
            while True:
                await self._registry.wait_until(lambda: self._stats() is not None)
                stats = self._stats()
                if stats is None:
                    continue
                started_s = asyncio.get_running_loop().time()
                problem = "the KV events ended"
                try:
                    await self._follow(stats)
                except* _ResyncError as group:
                    error = group.exceptions[0]
                    reason = error.reason if isinstance(error, _ResyncError) else "several"
                    _log.info("instance %s: KV events are taken up anew (%s)", self._instance, error)
                    self._meter.resync(self._instance, reason)
                    problem = str(error)
                self._registry.settle(self._instance, problem)
                self._index.drop(self._instance)
                if asyncio.get_running_loop().time() - started_s > _LONGEST_PAUSE_S:
                    pause_s = _RETRY_PAUSE_S
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        finally:
            self._index.drop(self._instance)

    def _now(self) -> Instance:
        return self._registry.get(self._instance)

    def _stats(self) -> InstanceStats | None:
        now = self._now()
        return now.stats if now.state is InstanceState.HEALTHY else None

    async def _follow(self, stats: InstanceStats) -> None:
        """Subscribe and follow until something makes a new start necessary: raises a group of ``_ResyncError``."""
        async with self._subscribed(_reachable(stats.events.endpoint, self._now().url)) as (socket, monitor):
            position = _Position(seq=-1)
            await self._take_snapshot(stats, position)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(socket, stats, position))
                group.create_task(self._watch_link(monitor))
                group.create_task(self._watch_instance(stats, position))

    @asynccontextmanager
    async def _subscribed(self, endpoint: str) -> AsyncIterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _QUEUE_BATCHES)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            try:
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise ExceptionGroup("subscribe", [_ResyncError("bad_endpoint", f"{endpoint}: {error}")]) from error
            yield socket, monitor
        finally:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)

    async def _take_snapshot(self, stats: InstanceStats, position: _Position) -> None:
        snapshot, residents = await self._fetch_snapshot()
        if snapshot.epoch != stats.epoch:
            raise ExceptionGroup(
                "snapshot", [_ResyncError("new_epoch", "the snapshot is of another life of the engine")]
            )
        self._index.reset(self._instance, residents)
        position.seq = snapshot.seq
        self._registry.settle(self._instance)
        _log.info(
            "instance %s: snapshot of %d blocks at event batch %d",
            self._instance,
            sum(len(blocks) for blocks in residents.values()),
            snapshot.seq,
        )

    async def _fetch_snapshot(self) -> tuple[Snapshot, Residents]:
        try:
            async with (
                asyncio.timeout(_SNAPSHOT_TIMEOUT_S),
                self._session.get(self._now().url + SNAPSHOT_PATH, allow_redirects=False) as answer,
            ):
                body = await answer.read()
                if answer.status != HTTPStatus.OK:
                    raise ExceptionGroup("snapshot", [_ResyncError("snapshot_failed", f"status {answer.status}")])
            snapshot = msgspec.json.decode(body, type=Snapshot)
            return snapshot, snapshot.residents()
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, ValueError, IdentityError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise ExceptionGroup("snapshot", [_ResyncError("snapshot_failed", detail)]) from error

    async def _read(self, socket: zmq.asyncio.Socket, stats: InstanceStats, position: _Position) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) < 2:  # noqa: PLR2004 - number and payload; a topic may come first
                self._meter.events(self._instance, 0, 1)
                continue
            try:
                seq = decode_seq(frames[-2])
            except WireError as error:
                _log.warning("instance %s: unreadable event message: %s", self._instance, error)
                self._meter.events(self._instance, 0, 1)
                continue
            if seq <= position.live_seq:
                raise _ResyncError("sequence_restarted", f"{seq} after {position.live_seq}")
            position.live_seq = seq
            if seq <= position.seq:
                continue
            if seq > position.seq + 1:
                await self._replay(_reachable(stats.events.replay_endpoint, self._now().url), position, until=seq)
            self._apply(frames[-1])
            position.seq = seq

    async def _replay(self, endpoint: str, position: _Position, *, until: int) -> None:
        """Apply the batches after ``position`` and before ``until``; raises ``_ResyncError`` when one can't be had."""
        first = position.seq + 1
        _log.info(
            "instance %s: event batches %d to %d are missing; asking for a replay", self._instance, first, until - 1
        )
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
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
                        self._apply(frames[-1])
                        position.seq = seq
        except (TimeoutError, zmq.ZMQError, WireError) as error:
            raise _ResyncError("replay_failed", f"{type(error).__name__}: {error}") from error
        finally:
            socket.close(0)
        if position.seq + 1 < until:
            raise _ResyncError("gap", f"batch {position.seq + 1} is no longer replayed")
        self._meter.resync(self._instance, "replayed")

    def _apply(self, payload: bytes) -> None:
        try:
            decoded = decode_batch(payload)
        except WireError as error:
            _log.warning("instance %s: unreadable event batch: %s", self._instance, error)
            self._meter.events(self._instance, 0, 1)
            return
        for event in decoded.batch.events:
            self._index.apply(self._instance, event)
        if decoded.undecodable:
            _log.warning("instance %s: unreadable events: %s", self._instance, decoded.undecodable[0])
        self._meter.events(self._instance, len(decoded.batch.events), len(decoded.undecodable))

    async def _watch_link(self, monitor: zmq.asyncio.Socket) -> None:
        await monitor.recv_multipart()
        raise _ResyncError("connection_lost")

    async def _watch_instance(self, stats: InstanceStats, position: _Position) -> None:
        """End the session when the health checks show that it can't be right any more."""
        clock = asyncio.get_running_loop().time
        seen = stats
        ahead_seq, ahead_since_s = -1, 0.0
        while True:
            last = seen
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEHIND_AFTER_S):
                    await self._registry.wait_until(lambda last=last: self._stats() is not last)  # type: ignore[misc]
            now = self._stats()
            if now is None:
                raise _ResyncError("instance_away", self._now().reason)
            if now.epoch != stats.epoch:
                raise _ResyncError("new_epoch")
            if now.events.endpoint != stats.events.endpoint:
                raise _ResyncError("new_endpoint")
            if now.events.dropped != stats.events.dropped:
                raise _ResyncError("events_dropped", f"{now.events.dropped} on the engine's side")
            if position.seq >= ahead_seq:
                ahead_seq, ahead_since_s = now.events.seq, clock()
            elif clock() - ahead_since_s > _BEHIND_AFTER_S:
                raise _ResyncError("behind", f"at batch {position.seq}, the engine published {ahead_seq}")
            seen = now


def _reachable(endpoint: str, url: str) -> str:
    """An endpoint that names no host (``tcp://*:5557``) is on the instance's own."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host in {"*", "0.0.0.0", "[::]"}:  # noqa: S104 - compared, not bound
        return f"tcp://{urlsplit(url).hostname}:{port}"
    return endpoint


__all__ = ["EventFeed", "FeedMeter"]
