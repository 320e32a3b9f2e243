"""The obvious residency index: a set of blocks per instance and tier. The oracle of ``FleetIndex``."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvcontrol.core import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, CacheTier, InstanceId, KvEvent
from kvcontrol.core.control import Residents
from kvcontrol.prefix_reuse.match import PrefixMatch


class NaiveFleetIndex:
    """``match`` walks the prompt once for each instance: O(instances x blocks)."""

    def __init__(self) -> None:
        self._held: dict[InstanceId, dict[CacheTier, set[BlockHash]]] = {}

    def reset(self, instance: InstanceId, residents: Residents) -> None:
        self._held[instance] = {tier: {block for block, _ in blocks} for tier, blocks in residents.items()}

    def extend(
        self, instance: InstanceId, tier: CacheTier, blocks: Iterable[tuple[BlockHash, BlockHash | None]]
    ) -> None:
        self._held.setdefault(instance, {}).setdefault(tier, set()).update(block for block, _ in blocks)

    def apply(self, instance: InstanceId, event: KvEvent) -> None:
        tiers = self._held.setdefault(instance, {})
        match event:
            case BlockStored():
                tiers.setdefault(event.tier, set()).update(event.block_hashes)
            case BlockRemoved():
                tiers.setdefault(event.tier, set()).difference_update(event.block_hashes)
            case AllBlocksCleared():
                tiers.clear()

    def drop(self, instance: InstanceId) -> None:
        self._held.pop(instance, None)

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[InstanceId, PrefixMatch]:
        found: dict[InstanceId, PrefixMatch] = {}
        for instance, tiers in self._held.items():
            by_tier: Counter[CacheTier] = Counter()
            for block in hashes:
                fastest = next((tier for tier in CacheTier if block in tiers.get(tier, ())), None)
                if fastest is None:
                    break
                by_tier[fastest] += 1
            if by_tier:
                found[instance] = PrefixMatch(blocks=by_tier.total(), by_tier=dict(by_tier))
        return found

    def blocks_held(self, instance: InstanceId) -> Mapping[CacheTier, int]:
        return {tier: len(blocks) for tier, blocks in self._held.get(instance, {}).items() if blocks}
