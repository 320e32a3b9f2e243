"""The KV cache of a scripted engine: real block hashes, real events over ZMQ, a replay window, and faults on demand."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence

import zmq
import zmq.asyncio

from kvcontrol.core import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    CacheIdentity,
    CacheTier,
    Epoch,
    EventBatch,
    KvEvent,
    Seq,
    chain_hashes,
    root_hash,
    token_bytes,
)
from kvcontrol.core.control import EventsInfo, Snapshot
from kvcontrol.core.wire import END_OF_REPLAY, decode_seq, encode_batch, encode_seq


class ScriptedCache:
    """Blocks by their real hashes. ``store`` returns how many prompt tokens were found, as an engine would."""

    def __init__(self, identity: CacheIdentity, *, replay_batches: int = 1000) -> None:
        self.identity = identity
        self.resident: dict[BlockHash, CacheTier] = {}
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self.epoch = Epoch(uuid.uuid4().hex)
        self.seq = -1
        self.muted = False  # batches are numbered and kept for replay, and never sent
        self.snapshots = 0
        self.reported_seq: int | None = None  # the same of the stats
        self.claimed_seq: int | None = None  # what a snapshot says that it contains, if not the truth
        self._replay_batches = replay_batches
        self._sent: dict[int, bytes] = {}
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._replayer = self._context.socket(zmq.ROUTER)
        for socket in (self._publisher, self._replayer):
            socket.setsockopt(zmq.LINGER, 0)
        self._endpoint = _bind(self._publisher)
        self._replay_endpoint = _bind(self._replayer)
        self._task = asyncio.get_running_loop().create_task(self._answer_replays())

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._publisher.close(0)
        self._replayer.close(0)
        self._context.term()

    @property
    def events(self) -> EventsInfo:
        seq = self.seq if self.reported_seq is None else self.reported_seq
        return EventsInfo(endpoint=self._endpoint, replay_endpoint=self._replay_endpoint, seq=seq)

    def hashes(self, tokens: Sequence[int], salt: str) -> list[BlockHash]:
        root = root_hash(self.identity, salt=salt)
        return chain_hashes(root, token_bytes(tokens), self.identity.block_size_tokens)

    def find(self, tokens: Sequence[int], salt: str) -> int:
        """Tokens of the prompt in the cache; never the last one."""
        size = self.identity.block_size_tokens
        found = 0
        for block in self.hashes(tokens, salt)[: (len(tokens) - 1) // size]:
            if block not in self.resident:
                break
            found += 1
        return found * size

    async def store(self, tokens: Sequence[int], salt: str) -> None:
        size = self.identity.block_size_tokens
        hashes = self.hashes(tokens, salt)
        new = [block for block in hashes if block not in self.resident]
        if not new:
            return
        first = len(hashes) - len(new)
        self.resident |= dict.fromkeys(new, CacheTier.HBM)
        self._parents |= dict(zip(hashes, [None, *hashes[:-1]], strict=True))
        await self.publish(
            BlockStored(
                block_hashes=tuple(new),
                parent=hashes[first - 1] if first else None,
                token_ids=tuple(tokens[first * size : len(hashes) * size]),
                block_size_tokens=size,
            )
        )

    async def remove(self, blocks: Sequence[BlockHash]) -> None:
        for block in blocks:
            self.resident.pop(block, None)
        await self.publish(BlockRemoved(block_hashes=tuple(blocks)))

    def with_what_follows(self, blocks: Sequence[BlockHash]) -> list[BlockHash]:
        """Return blocks that are held, and all held ones that follow them, tails first."""
        found = {block for block in blocks if block in self.resident}
        for block in self.resident:  # heads come before tails
            if self._parents[block] in found:
                found.add(block)
        return [block for block in reversed(self.resident) if block in found]

    async def clear(self) -> None:
        self.resident.clear()
        await self.publish(AllBlocksCleared())

    async def publish(self, *events: KvEvent) -> None:
        await self.publish_raw(encode_batch(EventBatch(published_at_s=time.time(), events=events)))

    async def publish_raw(self, payload: bytes) -> None:
        self.seq += 1
        self._sent[self.seq] = payload
        self._sent.pop(self.seq - self._replay_batches, None)
        if not self.muted:
            await self.send(b"", encode_seq(Seq(self.seq)), payload)

    async def send(self, *frames: bytes) -> None:
        """Send frames as they are, unnumbered and unkept: what only a publisher with a fault does."""
        await self._publisher.send_multipart(list(frames))

    def hold(self, blocks: int) -> None:
        """Be the owner of so many blocks, in chains of 100, without a word to anybody."""
        before: BlockHash | None = None
        for place in range(blocks):
            block = BlockHash(place.to_bytes(16, "big"))
            self.resident[block] = CacheTier.HBM
            self._parents[block] = before if place % 100 else None
            before = block

    def snapshot(self) -> Snapshot:
        self.snapshots += 1
        tiers: dict[CacheTier, list[tuple[BlockHash, BlockHash | None]]] = {}
        for block, tier in self.resident.items():
            tiers.setdefault(tier, []).append((block, self._parents[block]))
        seq = self.seq if self.claimed_seq is None else self.claimed_seq
        return Snapshot.of(epoch=self.epoch, seq=Seq(seq), identity=self.identity, residents=tiers)

    async def _answer_replays(self) -> None:
        while True:
            client, *_, first = await self._replayer.recv_multipart()
            for seq in range(decode_seq(first), self.seq + 1):
                if seq in self._sent:
                    await self._replayer.send_multipart([client, b"", encode_seq(Seq(seq)), self._sent[seq]])
            await self._replayer.send_multipart([client, b"", END_OF_REPLAY, b""])


def _bind(socket: zmq.asyncio.Socket) -> str:
    return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


__all__ = ["ScriptedCache"]
