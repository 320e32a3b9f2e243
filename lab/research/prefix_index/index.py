"""One engine's prefix index: from a prompt's tokens to the KV blocks that already hold its beginning.

A chained key names a block *and all before it*, so the tree of prefixes needs no tree walk to be searched: one flat
dictionary from key to node, looked up block by block until the first miss (``tree``). Nodes keep parent and children
only for what needs the shape: removing a block removes what hangs below it. Which block is evicted next is ``ages``'s
to say.

Readers take no lock: a look-up is a run of dictionary reads of nodes whose key, tokens and block id never change, and
leaves a note of what it used, which the next writer applies. So a reader never waits, not even for the eviction of a
million blocks, and may see a prefix that is being removed at that very moment. Whoever is going to *read the blocks*
takes ``acquire``, which compares tokens and pins what is still there, under the lock.

The contract is ``protocol.PrefixIndex``, the naive twin ``naive_index.NaivePrefixReuseIndex``.
"""

import operator
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType

from kvcontrol.core import BlockHash, WireError
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.core.integrity import must
from kvcontrol.prefix_reuse.metrics import PrefixReuseMetrics, PrefixReuseReport
from lab.research.prefix_index.ages import Ages
from lab.research.prefix_index.dump import MAX_PINS, Contents, HeldBlock, HeldEntry, decode, encode, key_of, let_go
from lab.research.prefix_index.entry import (
    EntryId,
    HeldPrefix,
    Insertion,
    LeadingIds,
    Lease,
    LeaseId,
    PrefixEntry,
    PrefixHit,
)
from lab.research.prefix_index.inputs import (
    checked_block_ids,
    checked_capacity,
    checked_metadata,
    checked_prompt_tokens,
    metadata_bytes,
)
from lab.research.prefix_index.keys import BlockKeys
from lab.research.prefix_index.matcher import HASH_CONFIDENCE, Lineage, PrefixMatcher
from lab.research.prefix_index.node import Node
from lab.research.prefix_index.tree import PrefixTree

_NODE_BYTES = 390
"""What a block costs beside its tokens: node, key, bytes object, places in three dictionaries; measured."""
_ENTRY_BYTES = 280
"""What an entry costs beside its metadata, whatever its length."""
_LEASE_BYTES = 130


class PrefixReuseIndex:
    """A ``PrefixIndex``. Writers exclude each other, readers nobody and wait for nobody.

    ``capacity_blocks`` > 0 bounds what is held (``ValueError`` otherwise); about 650 bytes a block of 64 tokens, 256
    of them the tokens themselves, which are kept because a hash is never trusted alone, and at most one entry a block,
    of 280 bytes and its bounded metadata: an entry is its last block and a length. Block ids are the caller's and are
    only handed back.
    """

    def __init__(
        self, keys: BlockKeys, *, capacity_blocks: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._capacity = checked_capacity(capacity_blocks)
        self.keys = keys
        self.metrics = PrefixReuseMetrics()
        self.matcher = PrefixMatcher(self, self.metrics)
        self._clock = clock
        self._width = keys.block_size_tokens * TOKEN_BYTES
        self._lock = threading.Lock()
        # under the lock, for writers
        self._tree = PrefixTree()
        self._ages = Ages(self._tree)
        self._entries: dict[EntryId, Node] = {}
        self._pinned_entries: dict[EntryId, int] = {}
        self._metadata_bytes = 0
        self._leases: dict[LeaseId, Node | None] = {}  # the tail, from which on all above it are pinned
        self._ids = count()

    def __len__(self) -> int:
        """Return the number of blocks held."""
        return len(self._tree)

    # Readers.

    def lookup(self, tokens: bytes, *, salt: str = "") -> PrefixHit:
        """Return the longest held prefix of a prompt, by hash alone; O(matched blocks), no lock."""
        return self.lookup_keys(self.keys.of(tokens, salt=salt), len(tokens) // TOKEN_BYTES)

    def lookup_keys(self, keys: Sequence[BlockHash], prompt_tokens: int) -> PrefixHit:
        """``lookup`` for a prompt whose block keys are known."""
        checked_prompt_tokens(prompt_tokens, len(keys), self.keys.block_size_tokens)
        started = self._clock()
        path = self._tree.path(keys)
        if path:
            self._ages.notes.append(path[-1])
        hit = _hit(path, self.keys.block_size_tokens, prompt_tokens, HASH_CONFIDENCE)
        self.metrics.looked_up(
            blocks=len(keys),
            matched_blocks=len(path),
            tokens=prompt_tokens,
            matched_tokens=hit.matched_length,
            took_s=self._clock() - started,
        )
        return hit

    def lookup_all(self, tokens: bytes, *, salt: str = "") -> tuple[PrefixEntry, ...]:
        """Return every inserted entry that the prompt starts with, shortest first; O(tokens), no lock."""
        found: list[tuple[BlockHash, HeldPrefix]] = []
        run: list[int] = []
        for place, node in enumerate(self._tree.path(self.keys.of(tokens, salt=salt))):
            if node.tokens != tokens[place * self._width : (place + 1) * self._width]:
                self.metrics.collided()
                break
            run.append(node.block_id)
            if node.entry is not None:
                found.append((node.key, node.entry))
        ids = tuple(run)
        return tuple(self._told(key, held, LeadingIds(ids, held.blocks)) for key, held in found)

    def report(self) -> PrefixReuseReport:
        """Return what was looked up and found, and what is held now; no lock."""
        held, entries = len(self._tree), len(self._entries)
        held_bytes = held * (_NODE_BYTES + self._width) + entries * _ENTRY_BYTES + self._metadata_bytes
        return self.metrics.report(
            entries=entries, held_blocks=held, held_bytes=held_bytes + len(self._leases) * _LEASE_BYTES
        )

    def lineage_of(self, key: BlockHash) -> Lineage | None:
        """Return what a held block was computed from, None for an unknown key; no lock."""
        node = self._tree.get(key)
        return None if node is None else Lineage(node.tokens, node.parent.key if node.parent else None, node.block_id)

    # Writers.

    def insert(
        self, tokens: bytes, kv_block_ids: Sequence[int], *, salt: str = "", metadata: Mapping[str, str] | None = None
    ) -> Insertion:
        """Hold a prompt's full blocks; O(tokens), with as many evictions as there are new blocks at most."""
        keys = self.keys.of(tokens, salt=salt)
        ids = checked_block_ids(kv_block_ids, len(keys))
        about = checked_metadata(metadata)
        with self._lock:
            self._ages.follow_notes()
            attached = 0
            path: list[Node] = []
            redundant: list[int] = []
            evicted: list[int] = []
            for place, (key, block_id) in enumerate(zip(keys, ids, strict=True)):
                block = tokens[place * self._width : (place + 1) * self._width]
                parent = path[-1] if path else None
                node = self._tree.get(key)
                if node is not None and (node.parent is not parent or node.tokens != block):
                    self.metrics.collided()
                    break
                if node is None:
                    if len(self._tree) >= self._capacity and not self._evict_one(evicted):
                        break
                    node = self._tree.attach(key, parent, block, block_id)
                    attached += 1
                elif node.block_id != block_id:
                    redundant.append(block_id)
                self._ages.leave(node)  # off the list while being inserted: not to be evicted to make room
                path.append(node)
            redundant += ids[len(path) :]
            for node in reversed(path):
                self._ages.rejoin(node)
            entry: PrefixEntry | None = None
            if path:
                held = self._enter(path[-1], len(path), about)
                entry = self._told(path[-1].key, held, tuple(node.block_id for node in path))
        self.metrics.inserted(attached)
        self.metrics.evicted(len(evicted))
        return Insertion(entry=entry, redundant_block_ids=tuple(redundant), evicted_block_ids=tuple(evicted))

    def acquire(self, tokens: bytes, *, salt: str = "") -> Lease:
        """Verify and pin in one step; O(tokens)."""
        keys = self.keys.of(tokens, salt=salt)
        with self._lock:
            self._ages.follow_notes()
            path = self._tree.path(keys)
            found = _hit(path, self.keys.block_size_tokens, len(tokens) // TOKEN_BYTES, HASH_CONFIDENCE)
            hit = self.matcher.verify(found, tokens)
            del path[len(hit.kv_block_ids) :]
            for node in path:
                self._pin(node)
            lease = Lease(lease_id=LeaseId(next(self._ids)), hit=hit)
            self._leases[lease.lease_id] = path[-1] if path else None
        return lease

    def release(self, lease_id: LeaseId) -> None:
        with self._lock:
            self._ages.follow_notes()
            if lease_id not in self._leases:
                raise KeyError(f"lease {lease_id} is not held")
            tail = self._leases.pop(lease_id)
            for node in () if tail is None else tail.upwards():
                if node in self._tree:
                    self._unpin(node)

    def pin(self, entry_id: EntryId) -> None:
        with self._lock:
            self._ages.follow_notes()
            for node in self._held(entry_id).upwards():
                self._pin(node)
            self._pinned_entries[entry_id] = self._pinned_entries.get(entry_id, 0) + 1

    def unpin(self, entry_id: EntryId) -> None:
        with self._lock:
            self._ages.follow_notes()
            tail = self._held(entry_id)
            pins = self._pinned_entries.get(entry_id, 0)
            if not pins:
                raise ValueError(f"entry {entry_id} is not pinned")
            if pins == 1:
                del self._pinned_entries[entry_id]
            else:
                self._pinned_entries[entry_id] = pins - 1
            for node in tail.upwards():
                self._unpin(node)

    def invalidate(self, key: BlockHash) -> tuple[int, ...]:
        """Forget a block and all below it; O(forgotten), and O(blocks above) where a pinned entry is lost."""
        with self._lock:
            self._ages.follow_notes()
            node = self._tree.get(key)
            gone = self._remove(node) if node is not None else ()
        self.metrics.invalidated(len(gone))
        return gone

    def evict_lru(self, blocks: int) -> tuple[int, ...]:
        """Forget up to ``blocks`` least recently used blocks; O(evicted)."""
        evicted: list[int] = []
        blocks = operator.index(blocks)
        with self._lock:
            self._ages.follow_notes()
            while len(evicted) < blocks and self._evict_one(evicted):
                pass
        self.metrics.evicted(len(evicted))
        return tuple(evicted)

    def dump(self) -> bytes:
        """Return all that is held as bytes; O(held), of which writers wait for the listing, readers for nothing."""
        with self._lock:
            self._ages.follow_notes()
            place: dict[BlockHash, int] = {}
            blocks: list[HeldBlock] = []
            for node in self._tree:  # a parent was attached before its children
                place[node.key] = len(blocks)
                blocks.append(
                    HeldBlock(node.key, place[node.parent.key] if node.parent else -1, node.tokens, node.block_id)
                )
            contents = Contents(
                identity=self.keys.identity,
                blocks=blocks,
                oldest_first=[place[node.key] for node in self._ages],
                entries=[
                    HeldEntry(place[tail.key], dict(tail.entry.metadata), self._pinned_entries.get(entry_id, 0))
                    for entry_id, tail in self._entries.items()
                    if tail.entry is not None
                ],
            )
        data = encode(contents)
        let_go(contents)
        return data

    @classmethod
    def load(
        cls, data: bytes, keys: BlockKeys, *, capacity_blocks: int, clock: Callable[[], float] = time.perf_counter
    ) -> "PrefixReuseIndex":
        """Build an index from a dump; O(held), and checked whole before it is handed out."""
        checked_capacity(capacity_blocks)
        contents = decode(data, keys.identity)
        index = cls(keys, capacity_blocks=max(capacity_blocks, len(contents.blocks)), clock=clock)
        try:
            index._restore(contents)
            index.check_integrity()
        except (ValueError, AssertionError) as error:
            raise WireError(f"the prefix dump contradicts itself: {error!r}") from error
        index.evict_lru(len(index) - capacity_blocks)
        if len(index) > capacity_blocks:
            raise ValueError(f"{len(index)} pinned blocks don't fit into capacity_blocks = {capacity_blocks}")
        index._capacity = capacity_blocks
        return index

    # Under the lock.

    def _restore(self, contents: Contents) -> None:
        nodes: list[Node] = []
        depths: list[int] = []
        for block, block_id in zip(
            contents.blocks,
            checked_block_ids([each.block_id for each in contents.blocks], len(contents.blocks)),
            strict=True,
        ):
            must(-1 <= block.parent < len(nodes), "a block has no parent")
            must(self._tree.get(key_of(block)) is None, "a block stands there twice")
            parent = nodes[block.parent] if block.parent >= 0 else None
            nodes.append(self._tree.attach(key_of(block), parent, block.tokens, block_id))
            depths.append(depths[block.parent] + 1 if block.parent >= 0 else 1)
        for each in contents.entries:
            must(0 <= each.tail < len(nodes) and 0 <= each.pins <= MAX_PINS, "an entry has no block or impossible pins")
            tail = nodes[each.tail]
            must(tail.entry is None, "an entry stands there twice")
            held = self._enter(tail, depths[each.tail], checked_metadata(each.metadata))
            tail.pins = each.pins
            if each.pins:
                self._pinned_entries[held.entry_id] = each.pins
        for node in reversed(nodes):  # children before parents
            if node.parent is not None:
                node.parent.pins += node.pins
        for place in contents.oldest_first:
            must(0 <= place < len(nodes), "the order names a block that isn't there")
            self._ages.rejoin(nodes[place])
        for node in reversed(nodes):
            if node not in self._ages:
                self._ages.rejoin(node)

    def _enter(self, tail: Node, blocks: int, metadata: dict[str, str]) -> HeldPrefix:
        """Hold an entry, unless there is one already."""
        if tail.entry is None:
            tail.entry = HeldPrefix(EntryId(next(self._ids)), blocks, MappingProxyType(metadata))
            self._entries[tail.entry.entry_id] = tail
            self._metadata_bytes += metadata_bytes(tail.entry.metadata)
        return tail.entry

    def _told(self, key: BlockHash, held: HeldPrefix, ids: Sequence[int]) -> PrefixEntry:
        return PrefixEntry(
            entry_id=held.entry_id,
            token_hash=key,
            token_length=held.blocks * self.keys.block_size_tokens,
            kv_block_ids=ids,
            metadata=held.metadata,
        )

    def _held(self, entry_id: EntryId) -> Node:
        try:
            return self._entries[entry_id]
        except KeyError:
            raise KeyError(f"entry {entry_id} is not held") from None

    def _pin(self, node: Node) -> None:
        node.pins += 1
        self._ages.leave(node)

    def _unpin(self, node: Node) -> None:
        node.pins -= 1
        self._ages.rejoin(node)

    def _evict_one(self, evicted: list[int]) -> bool:
        oldest = self._ages.oldest()
        if oldest is None:
            return False
        evicted += self._remove(oldest)
        return True

    def _remove(self, top: Node) -> tuple[int, ...]:
        """Forget a node and all below it, with the entries that end there and what those had pinned; O(removed)."""
        gone = self._tree.remove(top)
        lost_pins = 0
        for node in gone:
            self._ages.leave(node)
            if node.entry is not None:
                self._entries.pop(node.entry.entry_id, None)
                self._metadata_bytes -= metadata_bytes(node.entry.metadata)
                lost_pins += self._pinned_entries.pop(node.entry.entry_id, 0)
        if lost_pins and top.parent is not None:  # what the lost entries had pinned above
            for node in top.parent.upwards():
                node.pins -= lost_pins
                self._ages.rejoin(node)
        return tuple(node.block_id for node in gone)

    # Its own oracle.

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when links, list, pins or entries contradict each other. O(everything)."""
        with self._lock:
            self._tree.check(self._width)
            self._ages.check()
            pins = Counter({self._entries[entry_id]: times for entry_id, times in self._pinned_entries.items()})
            for tail in self._leases.values():
                pins.update(self._tree.lowest_held(tail))
            for node in reversed(self._tree):
                must(node.pins == pins[node], "a node's pins are not those of its entries and leases")
                if node.parent is not None and pins[node]:
                    pins[node.parent] += pins[node]
            for entry_id, node in self._entries.items():
                must(node in self._tree, "an entry's tail is not held")
                must(node.entry is not None and node.entry.entry_id == entry_id, "an entry's tail has another entry")
            size = sum(metadata_bytes(node.entry.metadata) for node in self._tree if node.entry is not None)
            must(size == self._metadata_bytes, "the metadata is miscounted")
            must(len(self._tree) <= self._capacity, "more blocks than the capacity")


def _hit(path: Sequence[Node], block_size_tokens: int, prompt_tokens: int, confidence: float) -> PrefixHit:
    matched = len(path) * block_size_tokens
    return PrefixHit(
        matched_length=matched,
        confidence=confidence if path else 1.0,
        remaining_tokens=prompt_tokens - matched,
        kv_block_ids=tuple(node.block_id for node in path),
        block_hashes=tuple(node.key for node in path),
    )
