"""The obvious prefix index, everything by scanning one list: the oracle of ``PrefixReuseIndex``."""

import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType

from kvcontrol.core import BlockHash, WireError
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.core.integrity import must
from kvcontrol.prefix_reuse.metrics import PrefixReuseMetrics, PrefixReuseReport
from lab.research.prefix_index.dump import MAX_PINS, Contents, HeldBlock, HeldEntry, decode, encode, key_of
from lab.research.prefix_index.entry import EntryId, Insertion, Lease, LeaseId, PrefixEntry, PrefixHit
from lab.research.prefix_index.inputs import (
    checked_block_ids,
    checked_capacity,
    checked_metadata,
    checked_prompt_tokens,
    metadata_bytes,
)
from lab.research.prefix_index.keys import BlockKeys
from lab.research.prefix_index.matcher import HASH_CONFIDENCE, Lineage, PrefixMatcher

_BLOCK_BYTES = 300


@dataclass(slots=True, eq=False, kw_only=True)
class _Block:
    born: int
    key: BlockHash
    parent: BlockHash | None
    tokens: bytes
    block_id: int
    entry: PrefixEntry | None = None
    pins: int = 0
    entry_pins: int = 0


class NaivePrefixReuseIndex:
    """A ``PrefixIndex`` in which every step is O(blocks held) and holds the one lock, look-ups too."""

    def __init__(
        self, keys: BlockKeys, *, capacity_blocks: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._capacity = checked_capacity(capacity_blocks)
        self.keys = keys
        self.metrics = PrefixReuseMetrics()
        self.matcher = PrefixMatcher(self, self.metrics)
        self._clock = clock
        self._lock = threading.RLock()
        self._blocks: list[_Block] = []  # from oldest to youngest
        self._leases: dict[LeaseId, list[_Block]] = {}
        self._ids = count()
        self._births = count()

    def __len__(self) -> int:
        return len(self._blocks)

    def lookup(self, tokens: bytes, *, salt: str = "") -> PrefixHit:
        return self.lookup_keys(self.keys.of(tokens, salt=salt), len(tokens) // TOKEN_BYTES)

    def lookup_keys(self, keys: Sequence[BlockHash], prompt_tokens: int) -> PrefixHit:
        checked_prompt_tokens(prompt_tokens, len(keys), self.keys.block_size_tokens)
        with self._lock:
            started = self._clock()
            path = self._path(keys)
            self._use(path)
            hit = self._hit(path, prompt_tokens, HASH_CONFIDENCE if path else 1.0)
            self.metrics.looked_up(
                blocks=len(keys),
                matched_blocks=len(path),
                tokens=prompt_tokens,
                matched_tokens=hit.matched_length,
                took_s=self._clock() - started,
            )
            return hit

    def lookup_all(self, tokens: bytes, *, salt: str = "") -> tuple[PrefixEntry, ...]:
        with self._lock:
            path = self._verified(self._path(self.keys.of(tokens, salt=salt)), tokens)
            return tuple(block.entry for block in path if block.entry is not None)

    def report(self) -> PrefixReuseReport:
        with self._lock:
            entries = [block.entry for block in self._blocks if block.entry is not None]
            return self.metrics.report(
                entries=len(entries),
                held_blocks=len(self),
                held_bytes=len(self) * (_BLOCK_BYTES + self._width())
                + sum(metadata_bytes(entry.metadata) + 8 * len(entry.kv_block_ids) for entry in entries),
            )

    def lineage_of(self, key: BlockHash) -> Lineage | None:
        with self._lock:
            block = self._get(key)
            return None if block is None else Lineage(block.tokens, block.parent, block.block_id)

    def insert(
        self, tokens: bytes, kv_block_ids: Sequence[int], *, salt: str = "", metadata: Mapping[str, str] | None = None
    ) -> Insertion:
        keys = self.keys.of(tokens, salt=salt)
        kv_block_ids = checked_block_ids(kv_block_ids, len(keys))
        about = checked_metadata(metadata)
        with self._lock:
            path: list[_Block] = []
            redundant: list[int] = []
            evicted: list[int] = []
            for place, key in enumerate(keys):
                mine = tokens[place * self._width() : (place + 1) * self._width()]
                parent = path[-1].key if path else None
                block = self._get(key)
                if block is None:
                    if len(self) >= self._capacity and not self._evict_one(evicted, path):
                        break
                    block = self._add(key, parent, mine, kv_block_ids[place])
                    self.metrics.inserted(1)
                elif block.tokens != mine or block.parent != parent:
                    self.metrics.collided()
                    break
                elif block.block_id != kv_block_ids[place]:
                    redundant.append(kv_block_ids[place])
                path.append(block)
            redundant += kv_block_ids[len(path) :]
            self._use(path)
            entry = self._enter(path, about) if path else None
            self.metrics.evicted(len(evicted))
            return Insertion(entry=entry, redundant_block_ids=tuple(redundant), evicted_block_ids=tuple(evicted))

    def acquire(self, tokens: bytes, *, salt: str = "") -> Lease:
        with self._lock:
            path = self._verified(self._path(self.keys.of(tokens, salt=salt)), tokens)
            for block in path:
                block.pins += 1
            hit = self._hit(path, len(tokens) // TOKEN_BYTES, 1.0)
            lease = Lease(lease_id=LeaseId(next(self._ids)), hit=hit)
            self._leases[lease.lease_id] = path
            return lease

    def release(self, lease_id: LeaseId) -> None:
        with self._lock:
            if lease_id not in self._leases:
                raise KeyError(f"lease {lease_id} is not held")
            self._unpin([block for block in self._leases.pop(lease_id) if self._get(block.key) is block])

    def pin(self, entry_id: EntryId) -> None:
        with self._lock:
            path = self._entry_path(entry_id)
            path[-1].entry_pins += 1
            for block in path:
                block.pins += 1

    def unpin(self, entry_id: EntryId) -> None:
        with self._lock:
            path = self._entry_path(entry_id)
            if not path[-1].entry_pins:
                raise ValueError(f"entry {entry_id} is not pinned")
            path[-1].entry_pins -= 1
            self._unpin(path)

    def invalidate(self, key: BlockHash) -> tuple[int, ...]:
        with self._lock:
            top = self._get(key)
            gone = set() if top is None else {key}
            while more := {block.key for block in self._blocks if block.parent in gone} - gone:
                gone |= more
            lost = [block for block in self._blocks if block.key in gone]
            above = [] if top is None else self._down_to(top)[:-1]
            self._blocks = [block for block in self._blocks if block.key not in gone]
            for _ in range(sum(block.entry_pins for block in lost)):
                self._unpin(above)
            self.metrics.invalidated(len(lost))
            return tuple(block.block_id for block in lost)

    def evict_lru(self, blocks: int) -> tuple[int, ...]:
        blocks = operator.index(blocks)
        with self._lock:
            evicted: list[int] = []
            while len(evicted) < blocks and self._evict_one(evicted, []):
                pass
            self.metrics.evicted(len(evicted))
            return tuple(evicted)

    def dump(self) -> bytes:
        with self._lock:
            blocks = sorted(self._blocks, key=lambda block: block.born)
            place = {block.key: at for at, block in enumerate(blocks)}
            tails = [(block.entry, block) for block in blocks if block.entry is not None]
            return encode(
                Contents(
                    identity=self.keys.identity,
                    blocks=[
                        HeldBlock(b.key, -1 if b.parent is None else place[b.parent], b.tokens, b.block_id)
                        for b in blocks
                    ],
                    oldest_first=[place[block.key] for block in self._blocks if not block.pins],
                    entries=[
                        HeldEntry(place[block.key], dict(entry.metadata), block.entry_pins)
                        for entry, block in sorted(tails, key=lambda tail: tail[0].entry_id)
                    ],
                )
            )

    @classmethod
    def load(
        cls, data: bytes, keys: BlockKeys, *, capacity_blocks: int, clock: Callable[[], float] = time.perf_counter
    ) -> "NaivePrefixReuseIndex":
        index = cls(keys, capacity_blocks=capacity_blocks, clock=clock)
        contents = decode(data, keys.identity)
        index._capacity = max(capacity_blocks, len(contents.blocks))
        try:
            index._restore(contents)
            index.check_integrity()
        except (AssertionError, ValueError) as error:
            raise WireError(f"the prefix dump contradicts itself: {error!r}") from error
        index.evict_lru(len(index) - capacity_blocks)
        if len(index) > capacity_blocks:
            raise ValueError(f"{len(index)} pinned blocks don't fit into capacity_blocks = {capacity_blocks}")
        index._capacity = capacity_blocks
        return index

    def check_integrity(self) -> None:
        with self._lock:
            keys = [block.key for block in self._blocks]
            must(len(set(keys)) == len(keys), "a key is held twice")
            must(len(keys) <= self._capacity, "more blocks than the capacity")
            for place, block in enumerate(self._blocks):
                must(len(block.tokens) == self._width(), "a block's tokens are not one block")
                parent = None if block.parent is None else self._get(block.parent)
                must(block.parent is None or parent is not None, "a parent is not held")
                must(
                    parent is None or parent.pins > 0 or parent in self._blocks[place:],
                    "a parent is older than its child",
                )
                leased = sum(block in path for path in self._leases.values())
                pinned = sum(b.entry_pins for b in self._blocks if b.entry_pins and block in self._down_to(b))
                must(block.pins == leased + pinned, "a block's pins are not those of its entries and leases")

    def _restore(self, contents: Contents) -> None:
        there = range(len(contents.blocks))
        checked_block_ids([held.block_id for held in contents.blocks], len(contents.blocks))
        for held in contents.blocks:
            must(-1 <= held.parent < len(self), "a block has no parent")
            parent = contents.blocks[held.parent].key if held.parent >= 0 else None
            self._add(key_of(held), None if parent is None else BlockHash(parent), held.tokens, held.block_id)
        born = [*self._blocks]
        for place in contents.oldest_first:
            must(place in there, "the order names a block that isn't there")
        named = [born[place] for place in contents.oldest_first]
        for block in [*named, *[block for block in reversed(born) if block not in named]]:
            self._use([block])
        for entry in contents.entries:
            must(entry.tail in there and 0 <= entry.pins <= MAX_PINS, "an entry has no block, or impossible pins")
            must(born[entry.tail].entry is None, "an entry stands there twice")
            made = self._enter(self._down_to(born[entry.tail]), checked_metadata(entry.metadata))
            for _ in range(entry.pins):
                self.pin(made.entry_id)

    def _width(self) -> int:
        return self.keys.block_size_tokens * TOKEN_BYTES

    def _get(self, key: BlockHash) -> _Block | None:
        return next((block for block in self._blocks if block.key == key), None)

    def _add(self, key: BlockHash, parent: BlockHash | None, tokens: bytes, block_id: int) -> _Block:
        block = _Block(born=next(self._births), key=key, parent=parent, tokens=tokens, block_id=block_id)
        self._blocks.append(block)
        return block

    def _enter(self, path: Sequence[_Block], metadata: dict[str, str]) -> PrefixEntry:
        tail = path[-1]
        if tail.entry is None:
            tail.entry = PrefixEntry(
                entry_id=EntryId(next(self._ids)),
                token_hash=tail.key,
                token_length=len(path) * self.keys.block_size_tokens,
                kv_block_ids=tuple(block.block_id for block in path),
                metadata=MappingProxyType(metadata),
            )
        return tail.entry

    def _path(self, keys: Sequence[BlockHash]) -> list[_Block]:
        path: list[_Block] = []
        for key in keys:
            block = self._get(key)
            if block is None or block.parent != (path[-1].key if path else None):
                break
            path.append(block)
        return path

    def _verified(self, path: list[_Block], tokens: bytes) -> list[_Block]:
        """Cut a path off before the first block whose tokens are not the prompt's, which is a collision."""
        for place, block in enumerate(path):
            if block.tokens != tokens[place * self._width() : (place + 1) * self._width()]:
                self.metrics.collided()
                return path[:place]
        return path

    def _entry_path(self, entry_id: EntryId) -> list[_Block]:
        for block in self._blocks:
            if block.entry is not None and block.entry.entry_id == entry_id:
                return self._down_to(block)
        raise KeyError(f"entry {entry_id} is not held")

    def _down_to(self, block: _Block) -> list[_Block]:
        """Return a block and its ancestors, first block first."""
        path = [block]
        while path[0].parent is not None and (above := self._get(path[0].parent)) is not None:
            path.insert(0, above)
        return path

    def _use(self, path: Sequence[_Block]) -> None:
        for block in reversed(path):
            self._blocks.remove(block)
            self._blocks.append(block)

    def _unpin(self, path: Sequence[_Block]) -> None:
        for block in path:
            block.pins -= 1
        self._use([block for block in path if not block.pins])

    def _evict_one(self, evicted: list[int], path: Sequence[_Block]) -> bool:
        for block in self._blocks:
            if not block.pins and block not in path:
                self._blocks.remove(block)
                evicted.append(block.block_id)
                return True
        return False

    def _hit(self, path: Sequence[_Block], prompt_tokens: int, confidence: float) -> PrefixHit:
        matched = len(path) * self.keys.block_size_tokens
        return PrefixHit(
            matched_length=matched,
            confidence=confidence,
            remaining_tokens=prompt_tokens - matched,
            kv_block_ids=tuple(block.block_id for block in path),
            block_hashes=tuple(block.key for block in path),
        )
