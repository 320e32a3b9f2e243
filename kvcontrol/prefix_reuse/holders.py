"""Residency of one instance, and the result of a match over all instances."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, overload

from kvcontrol.core import BlockHash, CacheTier, InstanceId
from kvcontrol.prefix_reuse.match import PrefixMatch

T = TypeVar("T")

TIERS = tuple(CacheTier)
TIER_BIT = {tier: 1 << place for place, tier in enumerate(TIERS)}
ONE_CHILD = 1 << len(TIERS)


class Holder:
    """One instance. ``held`` maps a block to its tiers' bits plus ``ONE_CHILD`` for each held child.

    ``holes`` counts the held children of blocks that are not held. ``own_parents`` has the parents of held blocks that
    this instance names otherwise than the shared table does.
    """

    __slots__ = ("bit", "blocks_in", "held", "holes", "own_parents")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.held: dict[BlockHash, int] = {}
        self.holes: dict[BlockHash, int] = {}
        self.own_parents: dict[BlockHash, BlockHash | None] = {}
        self.blocks_in = [0] * len(TIERS)


class Matches(Mapping[InstanceId, PrefixMatch]):
    """The result of ``match``, computed for an instance on demand; valid until the index changes.

    ``stops`` has a mask of instances for each number of leading blocks that some hold.
    """

    __slots__ = ("_by_instance", "_hashes", "_in_hbm", "_names", "_stops")

    def __init__(
        self,
        by_instance: Mapping[InstanceId, Holder],
        names: Mapping[int, InstanceId],
        hashes: Sequence[BlockHash],
        stops: Sequence[tuple[int, int]],
    ) -> None:
        self._by_instance = by_instance
        self._names = names
        self._hashes = hashes
        self._stops = stops
        self._in_hbm: dict[int, PrefixMatch] = {}

    def __getitem__(self, instance: InstanceId) -> PrefixMatch:
        match = self.get(instance)
        if match is None:
            raise KeyError(instance)
        return match

    @overload
    def get(self, instance: InstanceId) -> PrefixMatch | None: ...

    @overload
    def get(self, instance: InstanceId, default: T) -> PrefixMatch | T: ...

    def get(self, instance: InstanceId, default: T | None = None) -> PrefixMatch | T | None:
        """As ``Mapping.get``, without an exception for each instance that holds nothing."""
        holder = self._by_instance.get(instance)
        if holder is not None:
            for bits, blocks in self._stops:
                if bits & holder.bit:
                    return self._match(holder, blocks)
        return default

    def __iter__(self) -> Iterator[InstanceId]:
        names = self._names
        return iter([names[bit] for mask, _ in self._stops for bit in bits_of(mask)])

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits, _ in self._stops)

    def _match(self, holder: Holder, blocks: int) -> PrefixMatch:
        if holder.blocks_in[0] != len(holder.held):
            return split(holder.held, self._hashes, blocks)
        match = self._in_hbm.get(blocks)
        if match is None:
            match = self._in_hbm[blocks] = PrefixMatch(blocks=blocks, by_tier={CacheTier.HBM: blocks})
        return match


def split(held: Mapping[BlockHash, int], hashes: Sequence[BlockHash], blocks: int) -> PrefixMatch:
    """Return the tiers of the leading ``blocks``; O(tiers x log blocks)."""
    by_tier: dict[CacheTier, int] = {}
    start = 0
    fast = 0
    for tier, tier_bit in TIER_BIT.items():
        fast |= tier_bit
        low, high = start, blocks
        while low < high:  # sought is the first one that is slower
            middle = (low + high) // 2
            if held.get(hashes[middle], 0) & fast:
                low = middle + 1
            else:
                high = middle
        if low > start:
            by_tier[tier] = low - start
            start = low
        if start == blocks:
            break
    return PrefixMatch(blocks=blocks, by_tier=by_tier)


def bits_of(mask: int) -> Iterator[int]:
    """Yield the bits of a mask, lowest first."""
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit
