"""The pinned prefixes of any engine, their blocks below HBM, and the limit of pins.

How an engine keeps a block of its own memory is its own (``pin_book.py``).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from engines.control.errors import RefusedError
from kvcontrol.core.blocks import CacheTier
from kvcontrol.core.hashing import HASH_BYTES
from kvcontrol.core.ids import BlockHash, BlockId
from kvcontrol.core.integrity import must
from kvcontrol.core.prefix_control import (
    LONGEST_TTL_S,
    MOST_PINS,
    InvalidateRequest,
    Pin,
    PinRequest,
    Pins,
    UnpinRequest,
)
from kvcontrol.core.tier_control import MOST_BLOCKS
from kvcontrol.kv_runtime import HierarchyManager
from kvcontrol.kv_runtime.ticket import Change

_HASHES: Final = f"hashes (1 to {MOST_BLOCKS} names of blocks in prompt order, {2 * HASH_BYTES} hex digits each)"
PIN_BODIES: Final[Mapping[type, str]] = {
    PinRequest: f"{_HASHES} and ttl_s (null, or above 0 to {LONGEST_TTL_S:g} seconds)",
    UnpinRequest: f"hash (what a pin is called: {2 * HASH_BYTES} hex digits)",
    InvalidateRequest: _HASHES,
}
"""What is allowed in each body."""


class Limit(NamedTuple):
    """Limit of the number of different pinned blocks, and its source."""

    blocks: int
    why: str


@dataclass(slots=True)
class Pinned:
    """One pin: its blocks from the head on, and when it ends (None: when it is unpinned)."""

    keys: tuple[BlockHash, ...]
    until_s: float | None


class PinLedger:
    """All pins of one engine by their last block, and how many of them have each block."""

    def __init__(self) -> None:
        self.pins: dict[BlockHash, Pinned] = {}
        self.wanted: dict[BlockHash, int] = {}

    def renew(self, keys: Sequence[BlockHash], until_s: float | None) -> bool:
        """Let a prefix that is pinned stay so until then; False where it isn't."""
        same = self.pins.get(keys[-1])
        if same is None or same.keys[-len(keys) :] != tuple(keys):
            return False
        same.until_s = until_s
        return True

    def add(self, path: tuple[BlockHash, ...], until_s: float | None, limit: Limit) -> list[BlockHash]:
        """Replace a pin of the same name, and return the blocks that no pin has any more.

        Raises ``RefusedError`` where that would be too much; nothing has changed then.
        """
        tip = path[-1]
        if tip not in self.pins and len(self.pins) >= MOST_PINS:
            raise RefusedError(f"{MOST_PINS} prefixes are pinned, the most that an instance keeps; unpin one first")
        before = self.pins.get(tip)
        others = self.wanted.keys() if before is None else self._without(before)
        blocks = len(others | set(path))
        if blocks > limit.blocks:
            raise RefusedError(
                f"a prefix of {len(path)} blocks can't be pinned: {blocks} would be pinned then, and at most "
                f"{limit.blocks} may be ({limit.why})"
            )
        self.pins[tip] = Pinned(path, until_s)
        for key in path:
            self.wanted[key] = self.wanted.get(key, 0) + 1
        return [] if before is None else self._forget(before)

    def end(self, tip: BlockHash) -> list[BlockHash]:
        """Forget a pin and return the blocks that no other one has."""
        return self._forget(self.pins.pop(tip))

    def over(self, now_s: float) -> list[BlockHash]:
        """Return the expired pins."""
        return [tip for tip, pin in self.pins.items() if pin.until_s is not None and pin.until_s <= now_s]

    def having(self, keys: Collection[BlockHash]) -> list[BlockHash]:
        """Return the pins that have any of these blocks."""
        sought = frozenset(keys)
        return [tip for tip, pin in self.pins.items() if not sought.isdisjoint(pin.keys)]

    def report(
        self,
        places: Callable[[BlockHash], tuple[CacheTier, ...]],
        *,
        now_s: float,
        block_tokens: int,
        limit: Limit,
        errors: int,
    ) -> Pins:
        """Return all pins and where their blocks are."""
        shown = []
        for tip, pin in list(self.pins.items()):
            found = [places(key) for key in pin.keys]
            shown.append(
                Pin(
                    hash=tip.hex(),
                    blocks=len(pin.keys),
                    tokens=len(pin.keys) * block_tokens,
                    tiers=counted(found),
                    missing=sum(not each for each in found),
                    left_s=None if pin.until_s is None else round(max(0.0, pin.until_s - now_s), 3),
                )
            )
        return Pins(
            pins=shown,
            pinned_blocks=len(self.wanted),
            limit_blocks=limit.blocks,
            limited_by=limit.why,
            errors=errors,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when blocks are counted for other pins than there are."""
        wanted: dict[BlockHash, int] = {}
        for pin in self.pins.values():
            for key in pin.keys:
                wanted[key] = wanted.get(key, 0) + 1
        must(wanted == self.wanted, "blocks are counted for other pins than there are")

    def _forget(self, pin: Pinned) -> list[BlockHash]:
        last = []
        for key in pin.keys:
            left = self.wanted[key] - 1
            if left:
                self.wanted[key] = left
            else:
                del self.wanted[key]
                last.append(key)
        return last

    def _without(self, pin: Pinned) -> set[BlockHash]:
        """Return the blocks of all other pins."""
        own = set(pin.keys)
        return {key for key, pins in self.wanted.items() if pins > (key in own)}


class HeldBelow:
    """Wanted blocks below HBM, and the holds on them. ``hierarchy`` gives None where there are no tiers."""

    def __init__(self, hierarchy: Callable[[], HierarchyManager | None], wanted: Collection[BlockHash]) -> None:
        self._hierarchy = hierarchy
        self._wanted = wanted
        self.held: dict[BlockHash, BlockId] = {}

    def places(self, key: BlockHash) -> tuple[CacheTier, ...]:
        """Return the tiers that a held block is in."""
        hierarchy, block_id = self._hierarchy(), self.held.get(key)
        return () if hierarchy is None or block_id is None else hierarchy.locate(block_id)

    def above(self, key: BlockHash) -> list[BlockHash]:
        """Return the known ancestors of a block below HBM, from the head on."""
        path: list[BlockHash] = []
        hierarchy = self._hierarchy()
        seen = {key}
        while hierarchy is not None and (block_id := hierarchy.find(key)) is not None:
            record = hierarchy.record(block_id)
            if record is None or record.parent is None or record.parent in seen:
                break
            key = record.parent
            seen.add(key)
            path.append(key)
        return path[::-1]

    def following(self, keys: Collection[BlockHash]) -> set[BlockHash]:
        """Return the descendants of blocks below HBM. O(blocks below)."""
        hierarchy = self._hierarchy()
        if hierarchy is None:
            return set()
        children: dict[BlockHash | None, list[BlockHash]] = {}
        for _, record in hierarchy.blocks():
            children.setdefault(record.parent, []).append(record.key)
        return set(follow_up(children, keys))

    def hold(self, keys: Iterable[BlockHash]) -> None:
        """Hold those of the wanted blocks that are there."""
        if (hierarchy := self._hierarchy()) is not None:
            self._hold([(key, block_id) for key in keys if (block_id := hierarchy.find(key)) is not None])

    def release(self, keys: Iterable[BlockHash]) -> None:
        """Hold these no more."""
        held = [block_id for key in keys if (block_id := self.held.pop(key, None)) is not None]
        if held and (hierarchy := self._hierarchy()) is not None:
            hierarchy.claims.release(held)

    def follow(self, changes: Iterable[Change]) -> None:
        """Follow gains and losses of the tiers."""
        hierarchy = self._hierarchy()
        if hierarchy is None:
            return
        changes = list(changes)
        self._hold({change.record.key: change.block_id for change in changes if change.gained}.items())
        lost = {change.record.key: change.block_id for change in changes if not change.gained}
        self.release(
            [key for key, block_id in lost.items() if self.held.get(key) == block_id and not hierarchy.locate(block_id)]
        )

    def _hold(self, found: Iterable[tuple[BlockHash, BlockId]]) -> None:
        hierarchy = self._hierarchy()
        fresh = {block_id: key for key, block_id in found if key in self._wanted and self.held.get(key) != block_id}
        if hierarchy is None or not fresh:
            return
        self.release([key for key in fresh.values() if key in self.held])  # dropped, and there again
        self.held |= {fresh[block_id]: block_id for block_id in hierarchy.claims.hold(list(fresh))}


def limit_of(tiers: Mapping[CacheTier, int], *, share: float, setting: str, longest_blocks: int, option: str) -> Limit:
    """Return how much may be pinned: a share of each tier, as ``setting`` says, and what the longest request leaves of
    HBM, which takes fewer blocks when ``option`` is smaller.
    """
    pool = tiers[CacheTier.HBM]
    longest = Limit(
        max(0, pool - 1 - longest_blocks),
        f"the longest request takes {longest_blocks} of the {pool} blocks of HBM and must always find "
        f"room; a smaller {option} leaves more",
    )
    shares = [
        Limit(int(share * blocks), f"{setting}{share:g} of the {blocks} blocks of {tier}")
        for tier, blocks in tiers.items()
    ]
    return min(*shares, longest, key=lambda each: each.blocks)


def counted(places: Iterable[Iterable[CacheTier]]) -> dict[CacheTier, int]:
    """Return how often each tier is named."""
    counts: dict[CacheTier, int] = {}
    for tier in chain.from_iterable(places):
        counts[tier] = counts.get(tier, 0) + 1
    return counts


def follow_up(
    children: Mapping[BlockHash | None, Collection[BlockHash]], keys: Collection[BlockHash]
) -> dict[BlockHash, None]:
    """Return the descendants of blocks, by their children: heads before tails; no key follows another."""
    found: dict[BlockHash, None] = {}
    waiting = list(keys)
    while waiting:
        fresh = [key for key in children.get(waiting.pop(), ()) if key not in found]
        found.update(dict.fromkeys(fresh))
        waiting += fresh
    return found
