"""An engine's KV events in order: the resident blocks, pending events, and events for replay.

Two sides meet here. The *engine's side* (``stored``, ``removed``, ``cleared``) is called from its scheduling loop: O(1)
under a lock that is held for about a microsecond (longer only while a snapshot copies the mirror), and never fails for
want of room. The *publisher's side* (``publish``, ``snapshot``, ``replay``) belongs to one thread: it takes what waits,
gives it sequence numbers and keeps the last batches.

What makes it different from a queue: the resident set is kept on the engine's side, at the moment of recording. So a
queue that overflows loses only the *story*, never the *state*: the waiting events are discarded and counted as
``dropped``, and the next ``publish`` tells the state anew, as ``AllBlocksCleared`` and every resident block. No
subscriber needs a special case for it. And a snapshot first publishes what waits, so that its sequence number and its
blocks belong together exactly.

Rejected: the mirror on the publisher's side (after an overflow it is wrong, and only the engine's thread could walk the
cache to repair it), an unbounded queue (a stuck publisher would take the engine's memory), blocking the engine.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.control import Residents
from kvcontrol.core.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.core.ids import BlockHash, Seq
from kvcontrol.core.packed_tokens import PackedTokens
from kvcontrol.core.wire import encode_batch

DEFAULT_PENDING_BLOCKS = 65_536
DEFAULT_REPLAY_BATCHES = 10_000
MAX_BATCH_BLOCKS = 4_096
"""Blocks in one message: 4,096 blocks of 64 tokens are about 1 MB."""


class Published(NamedTuple):
    """One batch in its wire format."""

    seq: Seq
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCounters:
    """Totals since the log was made; ``seq`` is the last published batch, -1 before the first.

    ``stored`` and ``removed`` count blocks as the engine recorded them, ``cleared`` and ``dropped`` count events;
    ``resyncs`` says how often the state was told anew.
    """

    seq: int
    stored: int
    removed: int
    cleared: int
    dropped: int
    resyncs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Every resident block with its parent, after all batches up to and including ``seq``; parents before children."""

    seq: Seq
    tiers: Residents


class _Stored(NamedTuple):
    block: BlockHash
    parent: BlockHash | None
    tokens: bytes
    tier: CacheTier
    adapter: str


class _Removed(NamedTuple):
    block: BlockHash
    tier: CacheTier


class _Cleared(NamedTuple):
    pass


class _Place(NamedTuple):
    """The data of a resident block for snapshots."""

    parent: BlockHash | None
    adapter: str


_Record = _Stored | _Removed | _Cleared
_Mirror = dict[CacheTier, dict[BlockHash, _Place]]


class EventLog:
    """Sequence-numbered KV events over a mirror of the resident blocks (see the module's text).

    ``on_pending`` is called on the engine's side when events begin to wait, outside the lock: it wakes the publisher.
    ``clock`` gives Unix time in seconds. Memory: about 170 bytes per resident block, ``max_pending_blocks`` waiting
    events, ``replay_batches`` encoded batches.
    """

    def __init__(
        self,
        *,
        block_size_tokens: int,
        clock: Callable[[], float],
        on_pending: Callable[[], None],
        max_pending_blocks: int = DEFAULT_PENDING_BLOCKS,
        replay_batches: int = DEFAULT_REPLAY_BATCHES,
    ) -> None:
        self._block_size_tokens = block_size_tokens
        self._clock = clock
        self._on_pending = on_pending
        self._max_pending = max_pending_blocks
        self._lock = threading.Lock()
        # under the lock
        self._resident: _Mirror = {}
        self._pending: list[_Record] = []
        self._resync = False
        self._stored = self._removed = self._cleared = self._dropped = self._resyncs = 0
        # the publisher's own
        self._next_seq = 0
        self._ring: deque[Published] = deque(maxlen=replay_batches)

    @property
    def replay_batches(self) -> int:
        """How many batches are kept at most."""
        return self._ring.maxlen or 0

    # The engine's side.

    def stored(
        self,
        block: BlockHash,
        *,
        parent: BlockHash | None,
        tokens: bytes = b"",
        tier: CacheTier = CacheTier.HBM,
        adapter: str = "",
    ) -> None:
        """Record that ``block`` is readable in ``tier``; O(1).

        ``tokens`` are packed (``hashing.token_bytes``): exactly one block of them, or none. Raises ``ValueError``, and
        records nothing, for another length.
        """
        self.stored_all([(block, parent, tokens)], tier=tier, adapter=adapter)

    def removed(self, block: BlockHash, *, tier: CacheTier = CacheTier.HBM) -> None:
        """Record that ``block`` left ``tier``, also if it was never there; O(1)."""
        self.removed_all([block], tier=tier)

    def stored_all(
        self, blocks: Sequence[tuple[BlockHash, BlockHash | None, bytes]], *, tier: CacheTier, adapter: str = ""
    ) -> None:
        """Record blocks (key, parent, tokens) as ``stored`` does, in order, all or none of them; O(blocks)."""
        size = self._block_size_tokens * TOKEN_BYTES
        for _, _, tokens in blocks:
            if tokens and len(tokens) != size:
                raise ValueError(f"{len(tokens)} bytes of tokens for a block of {self._block_size_tokens} tokens")
        with self._lock:
            resident = self._resident.get(tier)
            if resident is None:
                resident = self._resident[tier] = {}
            new = tuple.__new__  # a third of what the constructors take, while a request waits
            for block, parent, _ in blocks:
                resident[block] = new(_Place, (parent, adapter))
            self._stored += len(blocks)
            first = self._enqueue([new(_Stored, (*block, tier, adapter)) for block in blocks])
        if first:
            self._on_pending()

    def removed_all(self, blocks: Sequence[BlockHash], *, tier: CacheTier) -> None:
        """Record blocks as ``removed`` does, in order; O(blocks)."""
        with self._lock:
            resident = self._resident.get(tier, {})
            for block in blocks:
                resident.pop(block, None)
            self._removed += len(blocks)
            new = tuple.__new__  # see ``stored_all``
            first = self._enqueue([new(_Removed, (block, tier)) for block in blocks])
        if first:
            self._on_pending()

    def cleared(self) -> None:
        """Record that nothing is resident any more, in any tier; O(resident) to free."""
        with self._lock:
            self._resident = {}
            self._cleared += 1
            first = self._enqueue((_Cleared(),))
        if first:
            self._on_pending()

    def _enqueue(self, records: Sequence[_Record]) -> bool:
        """Add records, under the lock; return whether the publisher must be woken."""
        if self._resync:  # the state will be told as a whole: these events are in it
            self._dropped += len(records)
            return False
        pending = self._pending
        if len(pending) + len(records) > self._max_pending:
            self._dropped += len(pending) + len(records)
            pending.clear()
            self._resync = True
            return True
        was_empty = not pending
        pending += records
        return was_empty and bool(records)

    # The publisher's side.

    def publish(self) -> list[Published]:
        """Give numbers to everything that waits and return it encoded, in order; O(waiting)."""
        return self._take(with_resident=False)[0]

    def snapshot(self) -> tuple[list[Published], Resident]:
        """Publish pending events, then return them with the resident blocks after them; O(resident)."""
        published, mirror = self._take(with_resident=True)
        tiers = {
            tier: [(block, place.parent) for block, place in _parents_first(blocks)]
            for tier, blocks in mirror.items()
            if blocks
        }
        return published, Resident(seq=Seq(self._next_seq - 1), tiers=tiers)

    def replay(self, first: Seq) -> Iterator[Published]:
        """Yield the kept batches from ``first`` on; a reader sees missing older ones as a gap."""
        if not self._ring:
            return iter(())
        return islice(self._ring, max(0, first - self._ring[0].seq), None)

    def resident_blocks(self) -> dict[CacheTier, int]:
        """Return how many blocks each tier holds; any thread."""
        with self._lock:
            return {tier: len(blocks) for tier, blocks in self._resident.items()}

    def counters(self) -> LogCounters:
        """Return the totals; any thread."""
        with self._lock:
            return LogCounters(
                seq=self._next_seq - 1,
                stored=self._stored,
                removed=self._removed,
                cleared=self._cleared,
                dropped=self._dropped,
                resyncs=self._resyncs,
            )

    def _take(self, *, with_resident: bool) -> tuple[list[Published], _Mirror]:
        with self._lock:
            pending, self._pending = self._pending, []
            resync, self._resync = self._resync, False
            self._resyncs += resync
            copy = with_resident or resync
            mirror = {tier: dict(blocks) for tier, blocks in self._resident.items()} if copy else {}
        records = _snapshot_records(mirror) if resync else iter(pending)
        return [self._number(events) for events in _batched(_coalesced(records, self._block_size_tokens))], mirror

    def _number(self, events: list[KvEvent]) -> Published:
        payload = encode_batch(EventBatch(published_at_s=self._clock(), events=tuple(events)))
        published = Published(Seq(self._next_seq), payload)
        self._next_seq += 1
        self._ring.append(published)
        return published


def _snapshot_records(mirror: _Mirror) -> Iterator[_Record]:
    yield _Cleared()
    for tier, blocks in mirror.items():
        for block, place in _parents_first(blocks):
            yield _Stored(block, place.parent, b"", tier, place.adapter)


def _parents_first(blocks: dict[BlockHash, _Place]) -> Iterator[tuple[BlockHash, _Place]]:
    """Yield each block once, after its parent where that lies in the same tier; O(n).

    Insertion order nearly does it, but a tier may lose a parent before its child and get it back later.
    """
    seen: set[BlockHash] = set()
    for block in blocks:
        chain: list[BlockHash] = []
        current: BlockHash | None = block
        while current is not None and current in blocks and current not in seen:
            seen.add(current)
            chain.append(current)
            current = blocks[current].parent
        for link in reversed(chain):
            yield link, blocks[link]


def _coalesced(records: Iterator[_Record], block_size_tokens: int) -> Iterator[KvEvent]:
    """Join each run of a chain's stores, and each run of removals, into one event of at most a batch's size."""
    run: list[_Stored] = []
    gone: list[_Removed] = []
    for record in records:
        if run and not (isinstance(record, _Stored) and _continues(run, record)):
            yield _stored_event(run, block_size_tokens)
            run = []
        if gone and not (
            isinstance(record, _Removed) and record.tier == gone[-1].tier and len(gone) < MAX_BATCH_BLOCKS
        ):
            yield _removed_event(gone)
            gone = []
        match record:
            case _Stored():
                run.append(record)
            case _Removed():
                gone.append(record)
            case _Cleared():
                yield AllBlocksCleared()
    if run:
        yield _stored_event(run, block_size_tokens)
    if gone:
        yield _removed_event(gone)


def _continues(run: list[_Stored], record: _Stored) -> bool:
    last = run[-1]
    return (
        record.parent == last.block
        and record.tier == last.tier
        and record.adapter == last.adapter
        and bool(record.tokens) == bool(last.tokens)
        and len(run) < MAX_BATCH_BLOCKS
    )


def _stored_event(run: list[_Stored], block_size_tokens: int) -> BlockStored:
    head = run[0]
    return BlockStored(
        block_hashes=tuple(record.block for record in run),
        parent=head.parent,
        token_ids=PackedTokens(b"".join([record.tokens for record in run])),
        block_size_tokens=block_size_tokens,
        tier=head.tier,
        adapter=head.adapter,
    )


def _removed_event(gone: list[_Removed]) -> BlockRemoved:
    return BlockRemoved(block_hashes=tuple(record.block for record in gone), tier=gone[0].tier)


def _batched(events: Iterator[KvEvent]) -> Iterator[list[KvEvent]]:
    """Cut a stream of events into batches of about ``MAX_BATCH_BLOCKS`` blocks."""
    batch: list[KvEvent] = []
    blocks = 0
    for event in events:
        size = 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        if batch and blocks + size > MAX_BATCH_BLOCKS:
            yield batch
            batch, blocks = [], 0
        batch.append(event)
        blocks += size
    if batch:
        yield batch
