"""The fleet's residency index: for every block, a bit mask of the instances that hold it, one table a tier.

What makes it different from a tree per instance: a chained hash already names the whole prefix, so no tree is needed
to know what comes before a block; and one table look-up answers for *all* instances at once. ``match`` walks the
prompt once, carrying the mask of instances that still follow, and stops when it is empty: O(matched blocks), whatever
the size of the fleet. Runs of blocks with equal masks (the normal case) cost one comparison a block.

Rejected: a radix tree with owners on its nodes (splits and merges on every event, 10x the memory), one set per
instance (``NaiveFleetIndex``: O(instances x blocks)).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvcontrol.core import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, CacheTier, InstanceId, KvEvent
from kvcontrol.prefix_reuse.match import PrefixMatch

_TIERS = tuple(CacheTier)


class FleetIndex:
    """Which instance holds which blocks in which tier.

    One writer and its readers share a thread (the gateway's event loop). ``apply`` is O(1) a block; ``drop`` and
    ``reset`` are O(blocks of that instance).
    """

    def __init__(self) -> None:
        self._bit: dict[InstanceId, int] = {}
        self._free_bits: list[int] = []
        self._holders: dict[CacheTier, dict[BlockHash, int]] = {tier: {} for tier in _TIERS}
        self._held: dict[InstanceId, dict[CacheTier, set[BlockHash]]] = {}

    def reset(self, instance: InstanceId, tiers: Mapping[CacheTier, Iterable[BlockHash]]) -> None:
        self._clear(instance)
        for tier, blocks in tiers.items():
            self._store(instance, tier, blocks)

    def apply(self, instance: InstanceId, event: KvEvent) -> None:
        match event:
            case BlockStored():
                self._store(instance, event.tier, event.block_hashes)
            case BlockRemoved():
                self._remove(instance, event.tier, event.block_hashes)
            case AllBlocksCleared():
                self._clear(instance)

    def drop(self, instance: InstanceId) -> None:
        bit = self._bit.get(instance)
        if bit is None:
            return
        self._clear(instance)
        del self._bit[instance], self._held[instance]
        self._free_bits.append(bit)

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[InstanceId, PrefixMatch]:
        depth: dict[int, dict[CacheTier, int]] = {bit: {} for bit in self._bit.values()}
        following = sum(depth)
        for masks, length in self._runs(hashes):
            following &= masks[0] | masks[1] | masks[2] | masks[3]
            if not following:
                break
            uncredited = following
            for tier, mask in zip(_TIERS, masks, strict=True):
                for bit in _bits(uncredited & mask):
                    depth[bit][tier] = depth[bit].get(tier, 0) + length
                uncredited &= ~mask
        return {
            instance: PrefixMatch(blocks=sum(by_tier.values()), by_tier=by_tier)
            for instance, bit in self._bit.items()
            if (by_tier := depth[bit])
        }

    def blocks_held(self, instance: InstanceId) -> Mapping[CacheTier, int]:
        return {tier: len(blocks) for tier, blocks in self._held.get(instance, {}).items() if blocks}

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the tables and the instances' own sets say the same. O(everything)."""
        rebuilt: dict[CacheTier, dict[BlockHash, int]] = {tier: {} for tier in _TIERS}
        for instance, tiers in self._held.items():
            for tier, blocks in tiers.items():
                for block in blocks:
                    rebuilt[tier][block] = rebuilt[tier].get(block, 0) | self._bit[instance]
        if rebuilt != self._holders:
            raise AssertionError("the holders' masks differ from the instances' sets")
        bits = [*self._bit.values(), *self._free_bits]
        if sorted(bits) != [1 << n for n in range(len(bits))]:
            raise AssertionError("instance bits are not unique and dense")

    def _runs(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Group a prompt's leading blocks by who holds them: (one mask a tier, number of blocks)."""
        hbm, ddr, nvme, remote = (self._holders[tier] for tier in _TIERS)
        current: tuple[int, ...] = ()
        length = 0
        for block in hashes:
            masks = (hbm.get(block, 0), ddr.get(block, 0), nvme.get(block, 0), remote.get(block, 0))
            if masks == current:
                length += 1
                continue
            if length:
                yield current, length
            if masks == _NOBODY:
                return
            current, length = masks, 1
        if length:
            yield current, length

    def _store(self, instance: InstanceId, tier: CacheTier, blocks: Iterable[BlockHash]) -> None:
        bit = self._bit.get(instance) or self._admit(instance)
        holders = self._holders[tier]
        held = self._held[instance].setdefault(tier, set())
        for block in blocks:
            holders[block] = holders.get(block, 0) | bit
            held.add(block)

    def _remove(self, instance: InstanceId, tier: CacheTier, blocks: Iterable[BlockHash]) -> None:
        held = self._held.get(instance, {}).get(tier)
        if not held:
            return
        bit = self._bit[instance]
        holders = self._holders[tier]
        for block in blocks:
            if block not in held:
                continue
            held.remove(block)
            left = holders[block] & ~bit
            if left:
                holders[block] = left
            else:
                del holders[block]

    def _clear(self, instance: InstanceId) -> None:
        for tier, blocks in self._held.get(instance, {}).items():
            self._remove(instance, tier, tuple(blocks))

    def _admit(self, instance: InstanceId) -> int:
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bit)
        self._bit[instance] = bit
        self._held[instance] = {}
        return bit


_NOBODY = (0,) * len(_TIERS)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


__all__ = ["FleetIndex"]
