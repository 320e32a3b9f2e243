"""The blocks of a simulated engine's prefix cache: where each lies, and which block comes before it."""

from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from typing import cast

from engines.control.pin_ledger import follow_up
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.core.integrity import must


class CachedBlocks:
    """Names and slots, each of which has one other. Everything is O(1) a block."""

    def __init__(self, parent_of: Callable[[BlockId], object]) -> None:
        self._slots: dict[BlockHash, BlockId] = {}
        self._keys: dict[BlockId, BlockHash] = {}
        self._parent_of = parent_of

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._slots

    @property
    def slots(self) -> KeysView[BlockId]:
        """The slots of all of them."""
        return self._keys.keys()

    def add(self, key: BlockHash, slot: BlockId) -> BlockId:
        """Note a block under a new name, and return its slot."""
        self._slots[key] = slot
        self._keys[slot] = key
        return slot

    def remove(self, slots: Iterable[BlockId]) -> list[BlockHash]:
        """Forget blocks by their slots, and return their names."""
        gone = [self._keys.pop(slot) for slot in slots]
        for key in gone:
            del self._slots[key]
        return gone

    def leading(self, keys: Sequence[BlockHash], limit: int) -> int:
        """Return how many of the first ``limit`` blocks of a path are cached, from its head on."""
        slots = self._slots
        for place in range(limit):
            if keys[place] not in slots:
                return place
        return limit

    def slots_of(self, keys: Sequence[BlockHash]) -> list[BlockId]:
        """Return where cached blocks lie."""
        slots = self._slots
        return [slots[key] for key in keys]

    def path_to(self, key: BlockHash, *, until: Collection[BlockHash] = ()) -> list[BlockHash]:
        """Return a cached block and what comes before it, heads first, from after ``until`` on; of others nothing."""
        path: list[BlockHash] = []
        place: BlockHash | None = key
        while place is not None and place in self._slots and place not in until:
            path.append(place)
            place = self._parent(place)
        return path[::-1]

    def with_what_follows(self, keys: Iterable[BlockHash]) -> list[BlockHash]:
        """Return those of some blocks that are cached and all that follows them, heads before tails. O(blocks)."""
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for key in self._slots:
            children.setdefault(self._parent(key), []).append(key)
        named = [key for key in dict.fromkeys(keys) if key in self._slots]
        below = follow_up(children, named)
        heads = [key for key in named if key not in below]
        return [*heads, *follow_up(children, heads)]

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the parts contradict each other. O(blocks)."""
        must(len(self._slots) == len(self._keys), "slots and names differ in number")
        must(all(self._slots[key] == slot for slot, key in self._keys.items()), "slots and names differ")

    def _parent(self, key: BlockHash) -> BlockHash | None:
        return cast("BlockHash | None", self._parent_of(self._slots[key]))
