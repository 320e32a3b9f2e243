"""The obvious prefix index, everything by scanning lists: the oracle of ``PrefixReuseIndex``. Not thread-safe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvcontrol.core import BlockHash
from kvcontrol.core.hashing import TOKEN_BYTES
from kvcontrol.prefix_reuse.entry import EntryId, Insertion, Lease, LeaseId, PrefixEntry, PrefixHit
from kvcontrol.prefix_reuse.keys import BlockKeys


@dataclass(slots=True, eq=False)
class _Block:
    key: BlockHash
    parent: BlockHash | None
    tokens: bytes
    block_id: int
    entry: PrefixEntry | None = None
    pins: int = 0
    entry_pins: int = 0


@dataclass(slots=True)
class _Held:
    """``blocks`` from oldest to youngest."""

    blocks: list[_Block] = field(default_factory=list)

    def get(self, key: BlockHash) -> _Block | None:
        return next((block for block in self.blocks if block.key == key), None)


class NaivePrefixReuseIndex:
    """Same contract as ``PrefixReuseIndex``; O(blocks held) for every step."""

    def __init__(self, keys: BlockKeys, *, capacity_blocks: int) -> None:
        self.keys = keys
        self._capacity = capacity_blocks
        self._held = _Held()
        self._leases: dict[LeaseId, list[_Block]] = {}
        self._ids = count()

    def __len__(self) -> int:
        return len(self._held.blocks)

    def lookup(self, tokens: bytes, *, salt: str = "") -> PrefixHit:
        path = self._path(tokens, salt)
        self._use(path)
        return self._hit(path, tokens)

    def lookup_all(self, tokens: bytes, *, salt: str = "") -> tuple[PrefixEntry, ...]:
        path = self._verified(self._path(tokens, salt), tokens)
        return tuple(block.entry for block in path if block.entry is not None)

    def insert(
        self, tokens: bytes, kv_block_ids: Sequence[int], *, salt: str = "", metadata: Mapping[str, str] | None = None
    ) -> Insertion:
        path: list[_Block] = []
        redundant: list[int] = []
        evicted: list[int] = []
        for place, key in enumerate(self.keys.of(tokens, salt=salt)):
            mine = tokens[place * self._width() : (place + 1) * self._width()]
            block = self._held.get(key)
            if block is None:
                if len(self) >= self._capacity and not self._evict_one(evicted, path):
                    break
                block = _Block(key, path[-1].key if path else None, mine, kv_block_ids[place])
                self._held.blocks.append(block)
            elif block.tokens != mine or block.parent != (path[-1].key if path else None):
                break
            elif block.block_id != kv_block_ids[place]:
                redundant.append(kv_block_ids[place])
            path.append(block)
        redundant += kv_block_ids[len(path) :]
        self._use(path)
        entry = None
        if path:
            tail = path[-1]
            if tail.entry is None:
                tail.entry = PrefixEntry(
                    entry_id=EntryId(next(self._ids)),
                    token_hash=tail.key,
                    token_length=len(path) * self.keys.block_size_tokens,
                    kv_block_ids=tuple(block.block_id for block in path),
                    metadata=dict(metadata or {}),
                )
            entry = tail.entry
        return Insertion(entry=entry, redundant_block_ids=tuple(redundant), evicted_block_ids=tuple(evicted))

    def acquire(self, tokens: bytes, *, salt: str = "") -> Lease:
        path = self._verified(self._path(tokens, salt), tokens)
        for block in path:
            block.pins += 1
        lease = Lease(lease_id=LeaseId(next(self._ids)), hit=self._hit(path, tokens))
        self._leases[lease.lease_id] = path
        return lease

    def release(self, lease_id: LeaseId) -> None:
        path = [block for block in self._leases.pop(lease_id) if self._held.get(block.key) is block]
        for block in path:
            block.pins -= 1
        self._use([block for block in path if not block.pins])

    def pin(self, entry_id: EntryId) -> None:
        path = self._entry_path(entry_id)
        path[-1].entry_pins += 1
        for block in path:
            block.pins += 1

    def unpin(self, entry_id: EntryId) -> None:
        path = self._entry_path(entry_id)
        if not path[-1].entry_pins:
            raise ValueError(f"entry {entry_id} is not pinned")
        path[-1].entry_pins -= 1
        for block in path:
            block.pins -= 1
        self._use([block for block in path if not block.pins])

    def invalidate(self, key: BlockHash) -> tuple[int, ...]:
        gone = {key} if self._held.get(key) else set()
        while more := {b.key for b in self._held.blocks if b.parent in gone} - gone:
            gone |= more
        lost = [block for block in self._held.blocks if block.key in gone]
        lost_pins = sum(block.entry_pins for block in lost)
        above = self._above(key)
        self._held.blocks = [block for block in self._held.blocks if block.key not in gone]
        for block in above:
            block.pins -= lost_pins
        if lost_pins:
            self._use([block for block in above if not block.pins])
        return tuple(block.block_id for block in lost)

    def evict_lru(self, blocks: int) -> tuple[int, ...]:
        evicted: list[int] = []
        while len(evicted) < blocks and self._evict_one(evicted, []):
            pass
        return tuple(evicted)

    def _width(self) -> int:
        return self.keys.block_size_tokens * TOKEN_BYTES

    def _path(self, tokens: bytes, salt: str) -> list[_Block]:
        path: list[_Block] = []
        for key in self.keys.of(tokens, salt=salt):
            block = self._held.get(key)
            if block is None or block.parent != (path[-1].key if path else None):
                break
            path.append(block)
        return path

    def _verified(self, path: list[_Block], tokens: bytes) -> list[_Block]:
        """Cut a path off before the first block whose tokens are not the prompt's."""
        for place, block in enumerate(path):
            if block.tokens != tokens[place * self._width() : (place + 1) * self._width()]:
                return path[:place]
        return path

    def _entry_path(self, entry_id: EntryId) -> list[_Block]:
        tail = next((b for b in self._held.blocks if b.entry is not None and b.entry.entry_id == entry_id), None)
        if tail is None:
            raise KeyError(f"entry {entry_id} is not held")
        path = [tail]
        while path[0].parent is not None:
            above = self._held.get(path[0].parent)
            if above is None:
                raise AssertionError("a parent is not held")
            path.insert(0, above)
        return path

    def _above(self, key: BlockHash) -> list[_Block]:
        """Return a block's ancestors, first block first; none for an unknown key."""
        above: list[_Block] = []
        block = self._held.get(key)
        while block is not None and block.parent is not None:
            block = self._held.get(block.parent)
            if block is not None:
                above.insert(0, block)
        return above

    def _use(self, path: Sequence[_Block]) -> None:
        for block in reversed(path):
            self._held.blocks.remove(block)
            self._held.blocks.append(block)

    def _evict_one(self, evicted: list[int], path: Sequence[_Block]) -> bool:
        for block in self._held.blocks:
            if not block.pins and not any(block is each for each in path):
                self._held.blocks.remove(block)
                evicted.append(block.block_id)
                return True
        return False

    def _hit(self, path: Sequence[_Block], tokens: bytes) -> PrefixHit:
        matched = len(path) * self.keys.block_size_tokens
        return PrefixHit(
            matched_length=matched,
            confidence=1.0,
            remaining_tokens=len(tokens) // TOKEN_BYTES - matched,
            kv_block_ids=tuple(block.block_id for block in path),
            block_hashes=tuple(block.key for block in path),
        )


__all__ = ["NaivePrefixReuseIndex"]
