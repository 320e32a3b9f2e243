"""One engine's prefix index: from a prompt's tokens to the KV blocks that already hold its beginning.

A chained key names a block *and all before it*, so the tree of prefixes needs no tree walk to be searched: one flat
dictionary from key to node, looked up block by block until the first miss. Nodes keep parent and children only for
what needs the shape: removing a block removes what hangs below it.

Eviction order without a heap: every use of a prefix moves its nodes to the young end of one list, *tail first, head
last*. So a parent is always younger than its children, the oldest node is always a leaf, and evicting from the old end
takes tails before heads in O(1). Pinned nodes are not in the list at all; a pinned node's ancestors are pinned too.

Readers take no lock: a look-up is a run of dictionary reads of nodes whose key, tokens and block id never change, and
leaves a note of what it used, which the next writer applies. So a reader never waits, not even for the eviction of a
million blocks, and may see a prefix that is being removed at that very moment. Whoever is going to *read the blocks*
takes ``acquire``, which compares tokens and pins what is still there, under the lock.

The naive twin is ``naive_index.NaivePrefixReuseIndex``.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from kvcontrol.core import BlockHash, WireError
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.prefix_reuse.dump import Contents, HeldBlock, HeldEntry, decode, encode, key_of
from kvcontrol.prefix_reuse.entry import EntryId, Insertion, Lease, LeaseId, PrefixEntry, PrefixHit
from kvcontrol.prefix_reuse.integrity import must
from kvcontrol.prefix_reuse.keys import BlockKeys
from kvcontrol.prefix_reuse.matcher import HASH_CONFIDENCE, Lineage, PrefixMatcher
from kvcontrol.prefix_reuse.metrics import PrefixReuseMetrics, PrefixReuseReport
from kvcontrol.prefix_reuse.node import Node

_MAX_NOTES = 65_536
_MAX_PINS = 1_000
"""Pins of one entry that a dump may ask for."""
_NODE_BYTES = 390
"""What a block costs beside its tokens: node, key, bytes object, places in three dictionaries; measured."""


class PrefixReuseIndex:
    """Which of one engine's KV blocks hold which prefix. Any thread; writers exclude each other, readers nobody.

    ``capacity_blocks`` > 0 bounds what is held (``ValueError`` otherwise); about 650 bytes a block of 64 tokens, 256
    of them the tokens themselves, which are kept because a hash is never trusted alone. Tokens are packed
    (``hashing.token_bytes``); block ids are the caller's and are only handed back.
    """

    def __init__(
        self, keys: BlockKeys, *, capacity_blocks: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if capacity_blocks <= 0:
            raise ValueError(f"capacity_blocks is {capacity_blocks}; it must be > 0")
        self.keys = keys
        self.metrics = PrefixReuseMetrics()
        self.matcher = PrefixMatcher(self, self.metrics)
        self._capacity = capacity_blocks
        self._clock = clock
        self._width = keys.block_size_tokens * TOKEN_BYTES
        self._notes: deque[Node] = deque(maxlen=_MAX_NOTES)
        self._lock = threading.Lock()
        # under the lock, for writers
        self._nodes: dict[BlockHash, Node] = {}
        self._by_age: OrderedDict[BlockHash, Node] = OrderedDict()
        self._entries: dict[EntryId, Node] = {}
        self._pinned_entries: dict[EntryId, int] = {}
        self._leases: dict[LeaseId, list[Node]] = {}
        self._ids = count()

    def __len__(self) -> int:
        """Return the number of blocks held."""
        return len(self._nodes)

    # Readers.

    def lookup(self, tokens: bytes, *, salt: str = "") -> PrefixHit:
        """Return the longest held prefix of a prompt, by hash alone; O(matched blocks), no lock."""
        return self.lookup_keys(self.keys.of(tokens, salt=salt), len(tokens) // TOKEN_BYTES)

    def lookup_keys(self, keys: Sequence[BlockHash], prompt_tokens: int) -> PrefixHit:
        """``lookup`` for a prompt whose block keys are known."""
        started = self._clock()
        path = self._path(keys)
        if path:
            self._notes.append(path[-1])
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
        """Return every inserted entry that the prompt starts with, shortest first; no lock."""
        found: list[PrefixEntry] = []
        for place, node in enumerate(self._path(self.keys.of(tokens, salt=salt))):
            if node.tokens != tokens[place * self._width : (place + 1) * self._width]:
                self.metrics.collided()
                break
            if node.entry is not None:
                found.append(node.entry)
        return tuple(found)

    def report(self) -> PrefixReuseReport:
        """Return what was looked up and found, and what is held now; no lock."""
        held = len(self._nodes)
        return self.metrics.report(
            entries=len(self._entries), held_blocks=held, held_bytes=held * (_NODE_BYTES + self._width)
        )

    def lineage_of(self, key: BlockHash) -> Lineage | None:
        """Return what a held block was computed from, None for an unknown key; no lock."""
        node = self._nodes.get(key)
        return None if node is None else Lineage(node.tokens, node.parent.key if node.parent else None, node.block_id)

    # Writers.

    def insert(
        self, tokens: bytes, kv_block_ids: Sequence[int], *, salt: str = "", metadata: Mapping[str, str] | None = None
    ) -> Insertion:
        """Hold a prompt's full blocks; ``kv_block_ids`` has one id for each of them (``ValueError`` otherwise).

        Blocks that are held already keep their ids; the caller's are returned as redundant. Room is made by evicting
        the least recently used. The entry is shorter than the prompt where no room could be made (all is pinned) or
        where a block's key belongs to other tokens (a collision, counted); what is left out is redundant too. An
        insertion that holds nothing has no entry.
        """
        keys = self.keys.of(tokens, salt=salt)
        if len(keys) != len(kv_block_ids):
            raise ValueError(f"{len(kv_block_ids)} kv_block_ids for {len(keys)} full blocks")
        with self._lock:
            self._apply_notes()
            attached = 0
            path: list[Node] = []
            redundant: list[int] = []
            evicted: list[int] = []
            for place, (key, block_id) in enumerate(zip(keys, kv_block_ids, strict=True)):
                block = tokens[place * self._width : (place + 1) * self._width]
                parent = path[-1] if path else None
                node = self._nodes.get(key)
                if node is not None and (node.parent is not parent or node.tokens != block):
                    self.metrics.collided()
                    break
                if node is None:
                    if len(self._nodes) >= self._capacity and not self._evict_one(evicted):
                        break
                    node = self._attach(key, parent, block, block_id)
                    attached += 1
                elif node.block_id != block_id:
                    redundant.append(block_id)
                self._by_age.pop(key, None)  # off the list while being inserted: not to be evicted to make room
                path.append(node)
            redundant += kv_block_ids[len(path) :]
            for node in reversed(path):
                self._rejoin(node)
            entry = self._enter(path, metadata or {}) if path else None
        self.metrics.inserted(attached)
        self.metrics.evicted(len(evicted))
        return Insertion(entry=entry, redundant_block_ids=tuple(redundant), evicted_block_ids=tuple(evicted))

    def acquire(self, tokens: bytes, *, salt: str = "") -> Lease:
        """Pin the longest held prefix whose *tokens* are equal, and return it; ``release`` it when done."""
        keys = self.keys.of(tokens, salt=salt)
        with self._lock:
            self._apply_notes()
            path = self._path(keys)
            found = _hit(path, self.keys.block_size_tokens, len(tokens) // TOKEN_BYTES, HASH_CONFIDENCE)
            hit = self.matcher.verify(found, tokens)
            del path[len(hit.kv_block_ids) :]
            for node in path:
                self._pin(node)
            lease = Lease(lease_id=LeaseId(next(self._ids)), hit=hit)
            self._leases[lease.lease_id] = path
        return lease

    def release(self, lease_id: LeaseId) -> None:
        """Unpin what ``acquire`` pinned and make it the youngest; blocks invalidated meanwhile are gone.

        Raises ``KeyError`` for a lease that isn't held (any more).
        """
        with self._lock:
            self._apply_notes()
            if lease_id not in self._leases:
                raise KeyError(f"lease {lease_id} is not held")
            for node in reversed(self._leases.pop(lease_id)):
                if self._nodes.get(node.key) is node:
                    self._unpin(node)

    def pin(self, entry_id: EntryId) -> None:
        """Keep an entry from eviction until as many ``unpin``; raises ``KeyError`` for one that isn't held."""
        with self._lock:
            self._apply_notes()
            for node in self._held(entry_id).upwards():
                self._pin(node)
            self._pinned_entries[entry_id] = self._pinned_entries.get(entry_id, 0) + 1

    def unpin(self, entry_id: EntryId) -> None:
        """Undo one ``pin``; raises ``KeyError`` for an entry that isn't held, ``ValueError`` for one not pinned."""
        with self._lock:
            self._apply_notes()
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
        """Forget a block and all below it, pinned or not, and return their block ids; none for an unknown key."""
        with self._lock:
            self._apply_notes()
            node = self._nodes.get(key)
            gone = self._remove_subtree(node) if node is not None else ()
        self.metrics.invalidated(len(gone))
        return gone

    def evict_lru(self, blocks: int) -> tuple[int, ...]:
        """Forget up to ``blocks`` least recently used blocks, tails before heads, and return their ids; never pinned
        ones. O(evicted).
        """
        evicted: list[int] = []
        with self._lock:
            self._apply_notes()
            while len(evicted) < blocks and self._evict_one(evicted):
                pass
        self.metrics.evicted(len(evicted))
        return tuple(evicted)

    def dump(self) -> bytes:
        """Return all that is held as bytes; leases are not part of it: who held them is gone after a restart."""
        with self._lock:
            self._apply_notes()
            place: dict[BlockHash, int] = {}
            blocks: list[HeldBlock] = []
            for node in self._nodes.values():  # a parent was attached before its children
                place[node.key] = len(blocks)
                blocks.append(
                    HeldBlock(node.key, place[node.parent.key] if node.parent else -1, node.tokens, node.block_id)
                )
            contents = Contents(
                identity=self.keys.identity,
                blocks=blocks,
                oldest_first=[place[key] for key in self._by_age],
                entries=[
                    HeldEntry(place[tail.key], dict(tail.entry.metadata), self._pinned_entries.get(entry_id, 0))
                    for entry_id, tail in self._entries.items()
                    if tail.entry is not None
                ],
            )
        return encode(contents)

    @classmethod
    def load(cls, data: bytes, keys: BlockKeys, *, capacity_blocks: int) -> "PrefixReuseIndex":
        """Build an index with the same blocks, ages, entries (under new ids) and pins as the dumped one.

        Blocks that only leases pinned come back as the youngest. Of more blocks than ``capacity_blocks`` the oldest
        are left out. Raises ``WireError`` for damaged bytes, ``IdentityError`` for another identity's, ``ValueError``
        when pinned blocks alone exceed the capacity.
        """
        if capacity_blocks <= 0:
            raise ValueError(f"capacity_blocks is {capacity_blocks}; it must be > 0")
        contents = decode(data, keys.identity)
        index = cls(keys, capacity_blocks=max(capacity_blocks, len(contents.blocks), 1))
        try:
            index._restore(contents)
            index.check_integrity()
        except (IndexError, KeyError, AssertionError) as error:
            raise WireError(f"the prefix dump contradicts itself: {error!r}") from error
        index.evict_lru(len(index) - capacity_blocks)
        if len(index) > capacity_blocks:
            raise ValueError(f"{len(index)} pinned blocks don't fit into capacity_blocks = {capacity_blocks}")
        index._capacity = capacity_blocks
        return index

    # Under the lock.

    def _restore(self, contents: Contents) -> None:
        nodes: list[Node] = []
        for block in contents.blocks:
            if not -1 <= block.parent < len(nodes) or key_of(block) in self._nodes:
                raise IndexError(f"block {len(nodes)} has no parent or stands there twice")
            parent = nodes[block.parent] if block.parent >= 0 else None
            nodes.append(self._attach(key_of(block), parent, block.tokens, block.block_id))
        if any(not 0 <= place < len(nodes) for place in contents.oldest_first):
            raise IndexError("the order names a block that isn't there")
        if any(not 0 <= held.tail < len(nodes) or not 0 <= held.pins <= _MAX_PINS for held in contents.entries):
            raise IndexError(f"an entry has no block, or not 0 to {_MAX_PINS} pins")
        for place in contents.oldest_first:
            self._rejoin(nodes[place])
        for node in reversed(nodes):  # children before parents
            if node.key not in self._by_age:
                self._rejoin(node)
        for held in contents.entries:
            path = [*nodes[held.tail].upwards()][::-1]
            entry = self._enter(path, held.metadata)
            for _ in range(held.pins):
                self.pin(entry.entry_id)

    def _path(self, keys: Sequence[BlockHash]) -> list[Node]:
        """Return the longest held run of keys, each node the child of the one before.

        Also without the lock: dictionary reads only.
        """
        get = self._nodes.get
        path: list[Node] = []
        parent: Node | None = None
        for key in keys:
            node = get(key)
            if node is None or node.parent is not parent:
                break
            path.append(node)
            parent = node
        return path

    def _attach(self, key: BlockHash, parent: Node | None, tokens: bytes, block_id: int) -> Node:
        node = Node(key, parent, tokens, block_id)
        if parent is not None:
            parent.adopt(node)
        self._nodes[key] = node
        return node

    def _enter(self, path: Sequence[Node], metadata: Mapping[str, str]) -> PrefixEntry:
        tail = path[-1]
        if tail.entry is None:
            entry_id = EntryId(next(self._ids))
            tail.entry = PrefixEntry(
                entry_id=entry_id,
                token_hash=tail.key,
                token_length=len(path) * self.keys.block_size_tokens,
                kv_block_ids=tuple(node.block_id for node in path),
                metadata=dict(metadata),
            )
            self._entries[entry_id] = tail
        return tail.entry

    def _held(self, entry_id: EntryId) -> Node:
        try:
            return self._entries[entry_id]
        except KeyError:
            raise KeyError(f"entry {entry_id} is not held") from None

    def _rejoin(self, node: Node) -> None:
        """Make a node the youngest, unless it is pinned."""
        if not node.pins:
            self._by_age[node.key] = node
            self._by_age.move_to_end(node.key)

    def _apply_notes(self) -> None:
        """Follow what readers used since the last write, each prefix once, in the order of its last use."""
        if not self._notes:
            return
        used: dict[Node, None] = {}
        for _ in range(len(self._notes)):
            tail = self._notes.popleft()
            used.pop(tail, None)
            used[tail] = None
        younger: list[Node] = []  # from the youngest use back; a node's ancestors have no older use than it has
        seen: set[Node] = set()
        for tail in reversed(used):
            if self._nodes.get(tail.key) is not tail:
                continue
            path: list[Node] = []
            for node in tail.upwards():
                if node in seen:
                    break
                path.append(node)
            seen.update(path)
            younger += reversed(path)
        for node in reversed(younger):
            self._rejoin(node)

    def _pin(self, node: Node) -> None:
        node.pins += 1
        self._by_age.pop(node.key, None)

    def _unpin(self, node: Node) -> None:
        node.pins -= 1
        self._rejoin(node)

    def _evict_one(self, evicted: list[int]) -> bool:
        if not self._by_age:
            return False
        evicted += self._remove_subtree(next(iter(self._by_age.values())))
        return True

    def _remove_subtree(self, top: Node) -> tuple[int, ...]:
        """Forget a node and all below it; O(removed)."""
        top.leave()
        gone: list[int] = []
        lost_pins = 0
        left = [top]
        while left:
            node = left.pop()
            left += node.children()
            del self._nodes[node.key]
            self._by_age.pop(node.key, None)
            if node.entry is not None:
                self._entries.pop(node.entry.entry_id, None)
                lost_pins += self._pinned_entries.pop(node.entry.entry_id, 0)
            gone.append(node.block_id)
        if lost_pins and top.parent is not None:  # what the lost entries had pinned above
            for node in top.parent.upwards():
                node.pins -= lost_pins
                self._rejoin(node)
        return tuple(gone)

    # Its own oracle.

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when links, list, pins or entries contradict each other. O(everything)."""
        with self._lock:
            pins: dict[Node, int] = {}
            for entry_id, times in self._pinned_entries.items():
                for node in self._entries[entry_id].upwards():
                    pins[node] = pins.get(node, 0) + times
            for path in self._leases.values():
                for node in path:
                    pins[node] = pins.get(node, 0) + 1
            for key, node in self._nodes.items():
                must(node.key == key, "a node lies under another key")
                must(len(node.tokens) == self._width, "a node's tokens are not one block")
                must(node.pins == pins.get(node, 0), "a node's pins are not those of its entries and leases")
                must((key in self._by_age) == (node.pins == 0), "the list holds a pinned node, or lacks another")
                for child in node.children():
                    must(self._nodes.get(child.key) is child and child.parent is node, "a child has another parent")
                if node.parent is not None:
                    must(self._nodes.get(node.parent.key) is node.parent, "a parent is not held")
                    must(any(node is child for child in node.parent.children()), "a parent doesn't know its child")
                    must(node.parent.pins >= node.pins, "a pinned node's parent is not pinned as often")
            ages = {key: age for age, key in enumerate(self._by_age)}
            for key, age in ages.items():
                parent = self._nodes[key].parent
                must(parent is None or parent.pins > 0 or ages[parent.key] > age, "a parent is older than its child")
            for entry_id, node in self._entries.items():
                must(node.entry is not None and node.entry.entry_id == entry_id, "an entry's tail has another entry")
            must(len(self._nodes) <= self._capacity, "more blocks than the capacity")


def _hit(path: Sequence[Node], block_size_tokens: int, prompt_tokens: int, confidence: float) -> PrefixHit:
    matched = len(path) * block_size_tokens
    return PrefixHit(
        matched_length=matched,
        confidence=confidence if path else 1.0,
        remaining_tokens=prompt_tokens - matched,
        kv_block_ids=tuple(node.block_id for node in path),
        block_hashes=tuple(node.key for node in path),
    )


__all__ = ["PrefixReuseIndex"]
